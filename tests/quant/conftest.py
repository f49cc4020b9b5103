"""Quantized checkpoints of tiny models, written tensor by tensor from the formats alone."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress import walk_block
from compress.architectures import fused_groups
from compress.checkpoint import Checkpoint
from compress.writer import write_json
from quant.calibrated import Calibration, run_calibrated
from quant.format import Format, quantize
from quant.plan import QuantizePlan, plan_quantize
from quant.scheme import quantization_config

# what is quantized, by the last part of its name
LAST = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
OTHER = ("lm_head", "gate")  # matrices an engine runs as linears that stay as they are


def write_quantized(source: Path, out: Path, fmt_of: Callable[[str], Format | None]) -> Path:
    """Quantize each linear of `source` with `fmt_of(module)`, round to nearest."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    weights = load_file(out / "model.safetensors")
    names = _modules(weights, LAST)
    formats = {name: fmt_of(name) for name in names}
    tensors = {name: tensor for name, tensor in weights.items() if not formats.get(name.removesuffix(".weight"))}
    for group in fused_groups(names):
        fused = torch.stack([weights[f"{name}.weight"].abs().max().float() for name in group]).max()
        for name in (name for name in group if formats[name]):
            weight = weights[f"{name}.weight"]
            stored = quantize(weight, formats[name], fused)
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = _block(formats, _others(weights))
    (out / "config.json").write_text(json.dumps(config))
    return out


def _modules(weights: dict[str, torch.Tensor], last: Sequence[str]) -> list[str]:
    found = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return [name for name in found if name.rpartition(".")[2] in last]


def _others(weights: dict[str, torch.Tensor]) -> list[str]:
    found = _modules(weights, OTHER)
    return found if "lm_head" in found else [*found, "lm_head"]


def _block(formats: dict[str, Format | None], others: Sequence[str]) -> dict[str, Any]:
    groups: dict[str, tuple[Format, list[str]]] = {}
    for name, fmt in formats.items():
        if fmt:
            groups.setdefault(f"{fmt.name}{fmt.options}", (fmt, []))[1].append(name)
    return quantization_config([*groups.values()], [*others, *(name for name, fmt in formats.items() if not fmt)])


@pytest.fixture
def quantized(
    tiny_float32: Callable[[str], Path], tiny_models: Callable[[str], Path], tmp_path: Path
) -> Callable[..., Path]:
    """write(kind or directory, fmt_of, dtype=...) -> directory; `fmt_of` a format, or a function of a module's name."""

    def write(
        source: str | Path, fmt_of: Format | Callable[[str], Format | None], dtype: torch.dtype = torch.float32
    ) -> Path:
        if isinstance(source, str):
            source = (tiny_float32 if dtype is torch.float32 else tiny_models)(source)
        choose = (lambda name: fmt_of) if isinstance(fmt_of, Format) else fmt_of
        return write_quantized(source, tmp_path / "quantized", choose)

    return write


def calibration(count: int = 8, length: int = 32) -> torch.Tensor:
    return torch.randint(3, 128, (count, length), generator=torch.Generator().manual_seed(0))


def plan_for(directory: Path, fmt: Format, ignore: Sequence[str] = ("lm_head",)) -> QuantizePlan:
    return plan_quantize(Checkpoint.open(directory), fmt, targets=("Linear",), ignore=ignore, max_shard_size=1 << 40)


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, list[dict[str, Any]]]]:
    """run(directory, fmt, method, out) -> a whole checkpoint in `out`, and the reports."""
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 64)

    def run(
        directory: Path,
        fmt: Format,
        method: str,
        out: Path,
        *,
        advance: Callable[[int], None] = lambda done: None,
        ignore: Sequence[str] = ("lm_head",),
    ) -> tuple[Path, list[dict[str, Any]]]:
        plan = plan_for(directory, fmt, ignore)
        out.mkdir(parents=True)
        wanted = Calibration(method, calibration(), out.parent / "journal", iterations=5)
        reports = run_calibrated(plan, wanted, out, torch.device("cpu"), advance)
        write_json(out / "config.json", plan.config)
        for file in plan.checkpoint.side_files:
            shutil.copy(directory / file, out / file)
        return out, reports

    return run


@pytest.fixture(scope="session")
def tiny_float32(tmp_path_factory: pytest.TempPathFactory, tiny_models: Callable[[str], Path]) -> Callable[[str], Path]:
    """Tiny models in float32, whose scales are float32 too: two loaders then agree in every bit."""
    root = tmp_path_factory.mktemp("float32")

    def get(kind: str) -> Path:
        if not (root / kind).exists():
            shutil.copytree(tiny_models(kind), root / kind)
            AutoModelForCausalLM.from_pretrained(root / kind, dtype=torch.float32).save_pretrained(root / kind)
        return root / kind

    return get
