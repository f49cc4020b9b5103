"""The `fit:` block: read with the recipe, answered before the work, shown in the run, the report and the page."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from compress.checkpoint import Checkpoint
from compress.errors import InputError, RecipeError
from compress.fit import Fit, check_fit, fit_lines, fit_record
from compress.page import PageInput, report_html
from compress.preview import preview_record, show_preview
from compress.recipe import Stage
from compress.recipe_file import load_recipe
from compress.report import report_markdown
from compress.stages import Place, plan_stages
from tests.compress.conftest import RUN

ASK = {"gpu": "L4", "users": 8, "context": "1k"}
KV = {"kv_cache": {"scheme": "fp8", "calibrate": "cast"}}


def planned(source: Path, folder: Path, *stages: dict) -> Checkpoint:
    """What the stages will write; nothing is."""
    read = [Stage.model_validate(stage) for stage in stages]
    return plan_stages(read, Checkpoint.open(source), Place(folder, 10**9))[-1].result


@pytest.fixture
def long(tiny: Path) -> Path:
    """The tiny model with positions enough."""
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return tiny


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu": "H10"}, "fit.gpu: gpu 'H10' is not known: did you mean 'H100-80GB'?"),
        ({"users": 0}, "fit.users: input should be greater than or equal to 1"),
        ({"context": "4q"}, "fit.context: input should be a valid integer"),
        ({"kv": "pf8"}, "fit.kv: KV format 'pf8' is not known: did you mean 'fp8'?"),
        ({"user": 8}, "fit.user: unknown key, did you mean 'users'?"),
    ],
    ids=["gpu", "users", "context", "kv", "key"],
)
def test_what_a_recipe_must_not_say(given: dict, message: str) -> None:
    overrides = [f"fit={json.dumps({**ASK, **given})}"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("fp8.yaml", overrides)
    assert message in str(caught.value)


def test_the_block_as_it_is_meant() -> None:
    found = load_recipe("fp8.yaml", ["fit.gpu=h100", "fit.users=160", "fit.context=4k"]).fit
    assert found == Fit(gpu="H100-80GB", users=160, context=4096)
    assert found.place == "1 x H100-80GB"


def test_a_kv_cache_that_an_engine_reads_holds_twice_as_many(long: Path, tmp_path: Path) -> None:
    wanted = Fit.model_validate(ASK)
    found = fit_record(wanted, Checkpoint.open(long), planned(long, tmp_path, KV))["fit"]
    assert found["variant"]["held"]["best"] == pytest.approx(2 * found["source"]["held"]["best"], rel=0.01)
    assert "with fp8 KV" in found["variant"]["sentence"]
    assert "with bf16 KV" in found["source"]["sentence"]


def test_a_kv_cache_that_is_only_emulated_is_counted_in_16_bits(long: Path, tmp_path: Path) -> None:
    emulated = planned(long, tmp_path, {"kv_cache": {"scheme": "int8"}})
    wanted = Fit.model_validate(ASK)
    sentence = fit_record(wanted, Checkpoint.open(long), emulated)["fit"]["variant"]["sentence"]
    assert sentence.endswith("with bf16 KV, 8 asked for; no engine keeps int8 from a checkpoint")
    forced = fit_record(Fit.model_validate({**ASK, "kv": "int8"}), Checkpoint.open(long), emulated)["fit"]
    assert "with int8 KV" in forced["variant"]["sentence"]


def test_a_variant_that_must_fit_and_does_not_is_refused_before_the_work(long: Path, tmp_path: Path) -> None:
    variant = planned(long, tmp_path, KV)
    many = Fit.model_validate({**ASK, "users": 10**9})
    check_fit(many, variant)  # it informs
    check_fit(None, variant)
    with pytest.raises(
        InputError, match=r"^fit\.required is set, and on 1 x L4-24GB the variant is not sure to fit \(d"
    ):
        check_fit(many.model_copy(update={"required": True}), variant)
    check_fit(Fit.model_validate({**ASK, "required": True}), variant)


def test_a_context_beyond_the_model_is_refused(long: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="context=8192 is longer than the 4096 positions"):
        check_fit(Fit.model_validate({**ASK, "context": "8k"}), planned(long, tmp_path, KV))


def test_a_dry_run_says_it_in_words_and_as_data(long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("fp8.yaml", [f"model={long}", f"output={tmp_path / 'out'}", f"fit={json.dumps(ASK)}"])
    source = Checkpoint.open(long)
    plans = plan_stages(recipe.stages, source, Place(tmp_path, 10**9))
    shown = io.StringIO()
    monkeypatch.setattr("compress.preview.Console", lambda **_: Console(file=shown, width=200))
    show_preview(recipe, source, plans, [])
    assert "fit       on 1 x L4-24GB: fits: holds " in shown.getvalue()
    found = json.loads(json.dumps(preview_record(recipe, source, plans)))
    assert found["fit"]["variant"]["verdict"] == "fits"
    assert found["bytes_before"] == source.nbytes > found["bytes_after"] == plans[-1].shards.nbytes
    assert found["resolution"].keys() == {"text", "math", "kl"}
    assert found["stages"][0]["layers"][0]["becomes"]


def test_reports_show_both_sides(make_run: Callable, long: Path, tmp_path: Path) -> None:
    _, gate = make_run()
    run = RUN | fit_record(Fit.model_validate(ASK), Checkpoint.open(long), planned(long, tmp_path, KV))
    [(where, source, variant)] = fit_lines(run)
    assert where == "on 1 x L4-24GB"
    assert source != variant
    text, page = report_markdown(gate, run), report_html(gate, run, PageInput({}))
    for sentence in (source, variant):
        assert sentence in text
        assert sentence in page
    assert fit_lines(RUN) == []
