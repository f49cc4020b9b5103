"""What is refused before any work: one sentence on standard error, the exit code, and nothing left behind."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from compress.cli import main
from tests.compress.test_run import SMALL

Compress = Callable[..., tuple[int, str, str]]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Compress:
    """The command in this process, working in the test's own folder; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compress", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), *capfd.readouterr()

    return call


@pytest.fixture
def run(compress: Compress) -> Run:
    """`compress run` of a recipe on a model, with little to measure."""
    return lambda recipe, model, *words: compress("run", f"recipe={recipe}", f"model={model}", *SMALL, *words)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["run", "recipe=fp88.yaml"], 2, "did you mean fp8.yaml?"),
        (["run", "fp8.yaml"], 2, "did you mean recipe=fp8.yaml?"),
        (["run", "recipe=fp8.yaml", "recipe=int4.yaml"], 2, "give one recipe"),
        (["run", "recipe=fp8.yaml", "model=./nowhere"], 2, "is no directory or .gguf file"),
        (["run", "recipe=fp8.yaml", "model=ORG/NAME"], 2, "cannot be fetched from the hub"),
        (["run", "recipe=fp8.yaml", "device=cuda:7"], 2, "device 'cuda:7' is not available here"),
        (["rnu"], 2, "Did you mean 'run'?"),
        (["list", "recipees"], 2, "did you mean 'recipes'?"),
        (["verify", "nowhere"], 2, "holds no evidence/gate.json"),
        (["inspect", "./nowhere"], 2, "is no directory or .gguf file"),
        (["plan", "./nowhere", "gpu"], 2, "'gpu' is not of the form key=value"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else "",
)
def test_usage_errors(compress: Compress, words: list[str], code: int, says: str, tmp_path: Path) -> None:
    found, _, stderr = compress(*words)
    assert found == code
    assert says in stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["output={model}/inside"], "lie in each other"),
        (["output={model}"], "lie in each other"),
        (
            ["stages.0.quantize.format=bf16", "stages.0.quantize.overrides=[{{targets: [Linear], format: int8}}]"],
            "format 'bf16' is for every layer: leave overrides out, or name another format",
        ),
        (["stages.0.quantize.ignore=[lm_haed]"], "did you mean 'lm_head'?"),
        (["stages.0.quantize.targets=[Linear, Embedding]"], "no engine loads a quantized embedding"),
        (["stages.0.quantize.ignore=[]"], "lm_head is tied to model.embed_tokens: add it to ignore"),
        (["stages.0.quantize.ignore=[lm_head, 're:.*q_proj$']"], "engines fuse"),
        (["evals.documents.text.source=./nothing.jsonl"], "does not exist"),
        (["evals.documents.text.count=100000"], "holds only"),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_refused_before_any_work(run: Run, overrides: list[str], says: str, tiny: Path, tmp_path: Path) -> None:
    code, _stdout, stderr = run("fp8.yaml", tiny, *(word.format(model=tiny) for word in overrides))
    assert code == 2
    assert says in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_group_size_lists_layers_by_kind(run: Run, tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    tensors = load_file(tiny / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        tensors[name] = tensors[name][:, :200].contiguous()
    save_file(tensors, tiny / "model.safetensors")
    (tiny / "config.json").write_text(json.dumps(config))
    code, _stdout, stderr = run("int4.yaml", tiny, "--dry-run")
    assert code == 2
    assert "its 200 columns are not a multiple of 64" in stderr
    assert "model.layers.*.mlp.down_proj (2)" in stderr


def test_dry_run_shows_the_plan_and_writes_nothing(run: Run, tiny: Path, tmp_path: Path) -> None:
    code, stdout, stderr = run("int4.yaml", tiny, "--dry-run")
    assert code == 0, stderr
    for words in ("group_size: 64", "to int4 (awq-gptq)", "what the gate can resolve", "times smaller", "free"):
        assert words in stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]
