"""Rows, the cheapest choice, the fit of a checkpoint, and the three ways a plan is shown."""

import json
from collections.abc import Callable
from io import StringIO
from math import ceil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, InputError
from compress.planner import as_json, draw, fits, print_plan, run_plan
from compress.planner.band import Band
from compress.planner.engine import GIB
from compress.planner.model import load_model
from compress.planner.picture import curve
from compress.planner.plan import PlanReport

Path_ = Callable[[str], str]
OPTIONS = {"gpu": "H100-80GB", "users": "160", "context": "4k", "ttft": "150ms", "tpot": "50ms"}


@pytest.fixture(scope="module")
def llama(config_path: Path_) -> PlanReport:
    return run_plan(config_path("Llama-3.1-8B"), OPTIONS)


def test_every_pair_has_a_row(llama: PlanReport) -> None:
    pairs = [(row.weight_format, row.kv_format) for row in llama.rows]
    assert pairs == [(fmt, kv) for fmt in ("bf16", "fp8", "mxfp4", "int4") for kv in ("bf16", "fp8", "int8")]


def test_rows_add_up(llama: PlanReport) -> None:
    """A slow twin: budget minus weights minus everything else, divided by one user's blocks."""
    row = llama.rows[0]
    logits = 1024 * 128256 * 4 / GIB
    left = 0.92 * 79.18 - 2 * 8_030_261_248 / GIB - 4.2 * logits - 0.13 - 0.5
    assert row.room.best / GIB == pytest.approx(left)
    assert row.users.best == int(left * GIB / (131072 * 16)) // (4096 // 16)
    assert row.context.best == 16 * (int(left * GIB / (131072 * 16)) // 160)


def test_bits_order_users(llama: PlanReport) -> None:
    users = {(row.weight_format, row.kv_format): row.users.best for row in llama.rows}
    assert users["bf16", "bf16"] < users["fp8", "bf16"] < users["mxfp4", "bf16"] <= users["int4", "bf16"]
    assert users["fp8", "bf16"] < users["fp8", "int8"] < users["fp8", "fp8"]


def test_the_choice_is_the_fewest_gpus_then_the_gentlest(llama: PlanReport) -> None:
    choice = llama.choice
    assert choice is not None
    assert (choice.row.weight_format, choice.row.kv_format, choice.gpus) == ("fp8", "fp8", 1)
    assert choice.certain
    assert all(row.served < 160 for row in llama.rows if row.weight_format == "bf16")


def test_served_users_meet_the_targets_and_one_more_does_not(config_path: Path_) -> None:
    options = {**OPTIONS, "formats": "bf16", "kv": "fp8"}
    served = run_plan(config_path("Llama-3.1-8B"), options).rows[0].served
    at, over = (
        run_plan(config_path("Llama-3.1-8B"), {**options, "users": str(users)}).rows[0].speed
        for users in (served, served + 1)
    )
    assert at is not None and over is not None
    assert at.tpot.best <= 0.05 < over.tpot.best


def test_a_sure_choice_goes_before_a_gentle_one(config_path: Path_) -> None:
    """On one H100 gpt-oss-120b in MXFP4 holds 16 users by the best guess, in INT4 even at worst."""
    options = {"gpu": "H100", "users": "16", "context": "8k"}
    report = run_plan(config_path("gpt-oss-120b"), options)
    assert report.choice is not None
    assert (report.choice.row.weight_format, report.choice.gpus, report.choice.certain) == ("int4", 1, True)
    guess = run_plan(config_path("gpt-oss-120b"), {**options, "formats": "mxfp4", "tp": "1"})
    assert guess.choice is not None
    assert (guess.choice.gpus, guess.choice.certain) == (1, False)
    assert "if the engine takes no more than the best guess." in _text(guess)


def test_without_targets_memory_decides(config_path: Path_) -> None:
    report = run_plan(config_path("Llama-3.1-8B"), {"gpu": "H100", "users": "100", "context": "4k"})
    assert report.choice is not None
    assert (report.choice.row.weight_format, report.choice.row.kv_format) == ("bf16", "bf16")


def test_copies_serve_what_one_cannot(config_path: Path_) -> None:
    options = {"gpu": "H100", "users": "1000", "context": "4k", "formats": "bf16", "kv": "bf16", "tp": "1"}
    choice = run_plan(config_path("Llama-3.1-8B"), options).choice
    assert choice is not None
    assert choice.copies == choice.gpus == ceil(1000 / choice.row.served)


def test_a_model_too_big_for_one_gpu_is_split(config_path: Path_) -> None:
    options = {"gpu": "H200", "users": "16", "context": "4k", "kv": "bf16,fp8"}
    report = run_plan(config_path("DeepSeek-V3"), options)
    assert report.tp == 1
    assert all(row.users.high == 0 and row.speed is None for row in report.rows if row.weight_format == "stored")
    assert report.choice is not None
    assert (report.choice.row.tp, report.choice.gpus) == (4, 4)
    assert report.choice.row.weight_format == "mxfp4"


def test_nothing_meets_an_impossible_target(config_path: Path_) -> None:
    report = run_plan(config_path("Qwen3-32B"), {**OPTIONS, "ttft": "1us"})
    assert report.choice is None
    assert all(row.served == 0 for row in report.rows)
    assert "Nothing meets 160 users of 4096 tokens, TTFT 0.001 ms, TPOT 50 ms" in _text(report)


def test_a_context_past_the_positions_is_refused(config_path: Path_) -> None:
    with pytest.raises(
        InputError, match=r"^context=65536 is longer than the 40960 positions of Qwen3-32B: shorten it$"
    ):
        run_plan(config_path("Qwen3-32B"), {**OPTIONS, "context": "64k"})


def test_a_latent_cache_asked_in_int8_only_is_refused(config_path: Path_) -> None:
    with pytest.raises(InputError, match=r"^no engine keeps the latent cache of DeepSeek-V3 as int8: use bf16$"):
        run_plan(config_path("DeepSeek-V3"), {**OPTIONS, "kv": "int8", "tp": "8"})


def _text(report: PlanReport) -> str:
    buffer = StringIO()
    print_plan(report, Console(file=buffer, width=180))
    return buffer.getvalue()


def test_the_table_says_everything_once(llama: PlanReport) -> None:
    text = _text(llama)
    assert "Llama-3.1-8B on 1 x H100-80GB" in text
    assert "16.06" in text and "128.00" in text
    assert " 55.2 " in text and " 50.7-57.0 " in text
    assert "Cheapest for 160 users of 4096 tokens, TTFT 150 ms, TPOT 50 ms: fp8 weights with fp8 KV cache, " in text
    assert "8.030e9 parameters, counted from the config alone" in text


def test_json_is_plain_and_whole(llama: PlanReport) -> None:
    found = json.loads(json.dumps(as_json(llama), allow_nan=False))
    assert found["model"]["parameters"] == 8_030_261_248
    assert len(found["rows"]) == len(llama.rows)
    assert set(found["rows"][0]["users"]) == {"low", "best", "high"}
    assert found["choice"]["gpus"] == 1
    assert found["engine"]["util"] == 0.92


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_written(suffix: str, magic: bytes, llama: PlanReport, tmp_path: Path) -> None:
    assert draw(llama, tmp_path / f"plan{suffix}").read_bytes().startswith(magic)


def test_the_curve_is_the_pool(llama: PlanReport) -> None:
    points = curve(llama, llama.rows[0], llama.rows[0].room.best)
    assert [length for length, _ in points] == sorted({length for length, _ in points})
    assert all(length * users * 131072 <= llama.rows[0].room.best for length, users in points)
    assert points[0][0] == 256 and points[-1][0] == 131072


def test_another_suffix_is_refused(llama: PlanReport) -> None:
    with pytest.raises(
        InputError, match=r"^a picture is written as \.png or \.svg, not 'plan\.bmp': change the suffix$"
    ):
        draw(llama, "plan.bmp")


TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(128, 64, dtype=torch.bfloat16),
        "model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 64, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(128, 64, dtype=torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.weight_scale": torch.zeros(128, 1, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**TINY, "quantization_config": {"quant_method": "compressed-tensors"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_directory_is_measured_by_its_headers(checkpoint: Path) -> None:
    model = load_model(str(checkpoint))
    assert model.measured
    assert model.parameters == 128 * 64 + 32 * 64 + 128 * 64
    assert sum(weight.stored * weight.count for weight in model.weights) == 2 * (128 + 32) * 64 + 128 * 64 + 2 * 128


def test_fits_uses_the_bytes_that_are_there(checkpoint: Path) -> None:
    report = fits(Checkpoint.open(checkpoint), gpu="L4-24GB", users=8, context=4096)
    assert report.verdict == "fits"
    assert report.weights == Band.exactly(2 * (128 + 32) * 64 + 128 * 64 + 2 * 128)
    assert report.sentence.startswith("fits: holds ")
    assert report.sentence.endswith("users of 4096 tokens with bf16 KV, 8 asked for")


def test_too_many_users_do_not_fit(checkpoint: Path) -> None:
    assert fits(Checkpoint.open(checkpoint), gpu="L4-24GB", users=10**9, context=4096).verdict == "does not fit"


def test_users_between_the_bounds_are_uncertain(checkpoint: Path) -> None:
    held = fits(Checkpoint.open(checkpoint), gpu="L4-24GB", users=1, context=4096).held
    assert held.low < held.high
    assert fits(Checkpoint.open(checkpoint), gpu="L4-24GB", users=int(held.high), context=4096).verdict == "uncertain"
    assert fits(Checkpoint.open(checkpoint), gpu="L4-24GB", users=int(held.low), context=4096).verdict == "fits"


def test_fits_names_a_misspelt_cache(checkpoint: Path) -> None:
    with pytest.raises(InputError, match=r"^KV format 'pf8' is not known: did you mean 'fp8'\?"):
        fits(Checkpoint.open(checkpoint), gpu="L4-24GB", users=1, context=128, kv="pf8")


def test_a_config_stands_for_its_directory(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    from_file, from_directory = load_model(str(checkpoint / "config.json")), load_model(str(checkpoint))
    assert from_file.name == from_directory.name == checkpoint.name
    assert from_file.parameters == from_directory.parameters
    assert not from_file.measured


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_model(str(tmp_path))


def test_what_is_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"^'a b' is no directory, no config\.json and no hub id: give one of them$"):
        load_model("a b")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(InputError, match=r"\(model_type 'no_such_model'\) is not understood by transformers"):
        load_model(str(tmp_path))


def test_offline_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as caught:
        load_model("no-such-owner/no-such-model")
    assert str(caught.value) == (
        "no-such-owner/no-such-model is no directory here, and its config and headers cannot be had from the hub "
        "(LocalEntryNotFoundError): check the name, log in, or give a local directory"
    )


def test_hub_headers_are_read_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import errors
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    tensor = TensorInfo(dtype="BF16", shape=[128, 64], data_offsets=(0, 2 * 128 * 64))
    file = SafetensorsFileMetadata(metadata={}, tensors={"model.embed_tokens.weight": tensor})
    repo = SafetensorsRepoMetadata(metadata=None, sharded=False, weight_map={}, files_metadata={"a": file})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: str(tmp_path / "config.json"))
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", lambda _: repo)
    assert load_model("owner/model").parameters == 128 * 64

    def none(_: str) -> None:
        raise errors.NotASafetensorsRepoError("no safetensors")

    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", none)
    assert not load_model("owner/model").measured


def test_a_band_must_be_ordered() -> None:
    with pytest.raises(ValueError, match="a band wants low <= best <= high, got 2, 1, 3"):
        Band(2, 1, 3)
    with pytest.raises(ValueError, match="a band wants"):
        Band(float("nan"), 1, 3)
    assert Band(1, 2, 3) - Band(0, 1, 2) == Band(-1, 1, 3)
