"""What a careless or hostile user may hand in: one sentence with exit code 2, no traceback, nothing left behind."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress import cli
from compress.checkpoint import Checkpoint
from compress.device import resolve_device
from compress.errors import CheckpointError, InputError, RecipeError
from compress.inputs import local_path, parse_json
from compress.inspection import inspect
from compress.manifest import EVIDENCE
from compress.recipe_file import load_recipe, parse_recipe
from compress.select import select
from compress.source import check_usable, fetch_source
from compress.staging import Places, check_output, staging
from compress.tensor_file import tensor_info
from evals.documents import read_documents
from quant.loader import load_model
from quant.scheme import formats_of

DEEP = "[" * 100_000
LONG = "9" * 5_000


@pytest.mark.parametrize("text", [DEEP, LONG, "{", ""], ids=["deep", "long-number", "cut-off", "empty"])
def test_json_is_wrong_in_one_way(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [("~nobody-of-that-name/x", "a user without a home directory"), ("a\0b", "holds a NUL character")],
    ids=["home", "nul"],
)
@pytest.mark.parametrize("use", [local_path, load_recipe, fetch_source, Places], ids=lambda use: use.__name__)
def test_path_that_cannot_be(use: Callable[[str], object], text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        use(text)


@pytest.mark.parametrize(
    "value", ["2020-13-45", LONG, "[" * 2_000, "!!python/name:os.system"], ids=["date", "long", "deep", "tag"]
)
def test_yaml_that_python_cannot_take(value: str) -> None:
    with pytest.raises(RecipeError, match="is not valid YAML"):
        parse_recipe(f"model: {value}")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe("fp8.yaml", [f"model={value}"])


def test_merge_key_is_no_key_given_twice() -> None:
    text = "a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\n"
    with pytest.raises(RecipeError, match=r"(?s)a: unknown key.*b: unknown key.*c: unknown key"):
        parse_recipe(text)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages=5", "stages: must be a list (got 5)"),
        ("gate=null", "gate: must be a mapping of keys to values (got None)"),
        ("model=5", "model: must be text (got 5)"),
        ("gate.metrics.kl.max=.nan", "gate.metrics.kl.max: input should be a finite number"),
        ("evals.problems.math.count=1000000000", "evals.problems.math.count: input should be less than"),
    ],
)
def test_wrong_type_in_the_words_of_a_recipe(override: str, says: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("fp8.yaml", [override])
    assert says in str(error.value)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"dtype": ["F32"], "shape": [0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": "12", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [0.5], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0], "data_offsets": ["a", "b"]},
        {"dtype": "F32", "shape": [0], "data_offsets": [None, None]},
        {"dtype": "F32", "shape": [0], "data_offsets": [0]},
    ],
    ids=["null", "dtype-list", "shape-text", "fraction", "infinite", "offset-text", "offset-null", "one-offset"],
)
def test_header_entry_of_other_types(entry: object) -> None:
    with pytest.raises(CheckpointError, match="tensor 'x'"):
        tensor_info(Path("x.safetensors"), 0, "x", entry)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("quantization_config", 5, "quantization_config is 5, not a mapping"),
        ("text_config", [1], r"text_config is \[1\], not a mapping"),
        ("text_config", {"num_hidden_layers": "x"}, "num_hidden_layers is 'x', not a whole number"),
        ("num_hidden_layers", 2.5, "num_hidden_layers is 2.5, not a whole number"),
        ("model_type", [1], r"model_type is \[1\], not text"),
        ("architectures", "x", "architectures is 'x', not a list"),
    ],
)
def test_config_of_other_types(tiny: Path, key: str, value: object, says: str) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tiny)


@pytest.mark.parametrize("text", [DEEP, LONG + "x", '{"a": ' + LONG + "}"], ids=["deep", "no-json", "long-number"])
def test_config_that_no_parser_takes(tiny: Path, text: str) -> None:
    (tiny / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        Checkpoint.open(tiny)


@pytest.mark.parametrize("shard", [5, [5], "", "../x.safetensors", "/etc/hosts"], ids=str)
def test_index_names_what_is_no_file_name(tiny: Path, shard: object) -> None:
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(CheckpointError, match="is no file name: the index is damaged"):
        Checkpoint.open(tiny)


@pytest.mark.parametrize("target", ["nowhere", "."], ids=["dangling", "directory"])
def test_weights_that_are_no_file(tiny: Path, target: str) -> None:
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors").symlink_to(target)
    with pytest.raises(CheckpointError, match="is missing or no file"):
        Checkpoint.open(tiny)


def test_weights_that_are_none(tiny: Path) -> None:
    (tiny / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="holds no weights"):
        Checkpoint.open(tiny)


@pytest.mark.parametrize("text", ["", "{}", "[]"], ids=["empty", "no-fields", "list"])
def test_tokenizer_that_is_damaged(tiny: Path, text: str) -> None:
    (tiny / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read"):
        load_model(tiny)


GARBLED = {"cut-off": '{"model": {"vo', "empty": "", "no-object": "[]", "binary": "\0\1"}


@pytest.mark.parametrize("text", GARBLED.values(), ids=GARBLED)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_small_files_are_read_before_the_work(tiny: Path, name: str, text: str) -> None:
    (tiny / name).write_text(text)
    with pytest.raises(
        CheckpointError, match=rf"{name} (is not valid JSON|holds no JSON|is empty).*: fetch the file again$"
    ):
        check_usable(Checkpoint.open(tiny), trust_remote_code=False)


@pytest.mark.parametrize("text", ["{}", '{"model": 5}', '{"model": {"vocab": null}}'])
def test_tokenizer_without_a_vocabulary_is_seen_before_the_work(tiny: Path, text: str) -> None:
    (tiny / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json holds no vocabulary: fetch the file again$"):
        check_usable(Checkpoint.open(tiny), trust_remote_code=False)


def _cut_tokenizer(tiny: Path) -> None:
    (tiny / "tokenizer.json").write_text((tiny / "tokenizer.json").read_text()[:-40])


def _name_missing_shard(tiny: Path) -> None:
    (tiny / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-2.safetensors"}}')


def _cut_shard(tiny: Path) -> None:
    (tiny / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut_tokenizer, "tokenizer.json is not valid JSON"),
        (_name_missing_shard, "the index names the shard model-2.safetensors, which is missing"),
        (_cut_shard, "the file is truncated or corrupt"),
    ],
    ids=["tokenizer", "index", "shard"],
)
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_damaged_source_is_refused_before_the_work(
    tiny: Path,
    damage: Callable[[Path], None],
    says: str,
    more: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(tiny)
    out = tiny.with_name("out")
    assert _command(monkeypatch, "run", "recipe=fp8.yaml", f"model={tiny}", f"output={out}", *more) == 2
    found = capsys.readouterr()
    assert says in found.err and found.err.count("\n") == 1 and found.out == ""
    assert not out.exists() and not Places(str(out)).staging.exists()


@pytest.mark.parametrize("groups", [5, [1], {"g": {"targets": ["Linear"], "weights": 7}}], ids=str)
def test_quantization_config_that_is_damaged(groups: object) -> None:
    with pytest.raises(CheckpointError):
        formats_of({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})


def test_tensor_without_a_module_is_inspected(tiny: Path) -> None:
    save_file({"foo": torch.ones(4)}, tiny / "model.safetensors")
    assert [group.weights for group in inspect(Checkpoint.open(tiny))] == [4]


def test_line_of_data_that_no_parser_takes(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"text": {LONG}}}\n')
    with pytest.raises(InputError, match=r"line 1 of .* is not JSON"):
        read_documents(str(tmp_path / "x.jsonl"))


def test_class_that_the_checkpoint_has_not() -> None:
    with pytest.raises(RecipeError, match="targets: the checkpoint has no module of the class 'Linear'"):
        select([], ["Linear"], [])


def test_device_that_computes_nothing() -> None:
    with pytest.raises(InputError, match="device 'meta' is not available here"):
        resolve_device("meta")
    assert resolve_device("cpu") == torch.device("cpu")


def test_output_that_is_the_root() -> None:
    with pytest.raises(InputError, match="output '/' is the root of the disk"):
        Places("/")
    assert Places("a/b/..").output == Path.cwd() / "a"


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("file", "file exists and is no directory"),
        ("link", "link exists and is no directory"),
        ("file/x/y", r"lies in .*file, which is a file"),
    ],
)
def test_output_that_cannot_be_made(tmp_path: Path, output: str, says: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=says):
        check_output(Places(str(tmp_path / output)), tmp_path / "source", 1, overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_full_disk_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the run needs 1020000000\.00 GB in .*are free: free space or choose"):
        check_output(Places(str(tmp_path / "out")), tmp_path / "source", 10**18, overwrite=False)


def test_output_where_one_may_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, who may run the tests, may write anywhere
    with pytest.raises(InputError, match="lies in /, where you may not write"):
        check_output(Places("/out/x"), Path("/source"), 1, overwrite=False)


def test_key_of_a_run_that_was_cut_off_starts_again(tmp_path: Path) -> None:
    places = Places(str(tmp_path / "out"))
    places.staging.mkdir()
    (places.staging / "key.json").write_text('{"ver')
    (places.staging / "0-quantize").mkdir()
    with staging(places, {"version": "1"}) as folder:
        assert sorted(path.name for path in folder.iterdir()) == ["key.json"]
    shutil.rmtree(folder)


def _command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["compress", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_no_words_get_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(monkeypatch) == 2
    found = capsys.readouterr()
    assert found.err.startswith("Usage: ")
    assert "error:" not in found.err


def test_path_that_is_too_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _command(monkeypatch, "verify", "x" * 300) == 2
    found = capsys.readouterr()
    assert "error: the path is too long" in found.err
    assert found.out == ""


@pytest.mark.parametrize("name", ["gate.json", "manifest.json", "recipe.lock.yaml"])
def test_evidence_that_no_parser_takes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / EVIDENCE).mkdir()
    (tmp_path / EVIDENCE / "gate.json").write_text("{}")
    (tmp_path / EVIDENCE / name).write_text(DEEP)
    assert _command(monkeypatch, "verify", str(tmp_path)) == 5
    assert "Traceback" not in capsys.readouterr().err
