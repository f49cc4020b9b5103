"""The error of a layer's weights while they stream: against what the written tensors decode to, row by row."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quant.compiled import eager
from quant.format import ROWS, dequantize, quantize
from quant.formats import FORMATS, make_format
from quant.stream import run_streaming
from quant.weight_error import EVERY, energies, relative_error
from tests.quant.conftest import plan_for


def weight(rows: int, columns: int = 256) -> torch.Tensor:
    noise = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (noise * torch.linspace(0.1, 3, rows).unsqueeze(1)).bfloat16()


def error_in_runs(whole: torch.Tensor, fmt_name: str, length: int) -> float | None:
    fmt = make_format(fmt_name)
    absmax = whole.abs().amax().float() if fmt.absmax_scope else None
    kernel, runs = eager(fmt), []
    for start in range(0, whole.shape[0], length):
        run = whole[start : start + length]
        runs.append(energies(run, *kernel.rounded(run, absmax), fmt, start=start))
    return relative_error(runs)


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_the_error_of_what_is_stored_on_the_sampled_rows(name: str) -> None:
    whole = weight(ROWS * 34 + 40)
    fmt = make_format(name)
    absmax = whole.abs().amax().float() if fmt.absmax_scope else None
    stored = dequantize(quantize(whole, fmt, absmax), fmt, (whole.shape[0], whole.shape[1]))
    tall = fmt.block[0] or 1
    rows = [row for row in range(whole.shape[0]) if row // tall % EVERY == 0]
    true = whole[rows].double()
    expected = float((stored[rows].double() - true).square().sum() / true.square().sum())
    for length in (ROWS, ROWS * 5, whole.shape[0]):  # the same whatever the length of a run
        assert error_in_runs(whole, name, length) == pytest.approx(expected, rel=1e-5)


def test_the_sample_tells_the_whole() -> None:
    whole = weight(2048)
    fmt = make_format("int4")
    stored = dequantize(quantize(whole, fmt), fmt, (2048, 256))
    full = float((stored.double() - whole.double()).square().sum() / whole.double().square().sum())
    assert error_in_runs(whole, "int4", 512) == pytest.approx(full, rel=0.15)  # 64 of 2048 rows


def test_weights_that_are_all_zero_have_no_relative_error() -> None:
    assert error_in_runs(torch.zeros(256, 256, dtype=torch.bfloat16), "int8", 128) is None


def test_every_streamed_layer_has_one(tiny_models: Callable[[str], Path], tmp_path: Path) -> None:
    plan = plan_for(tiny_models("qwen3-moe"), make_format("fp8"))
    errors = run_streaming(plan, tmp_path, torch.device("cpu"), lambda done: None)
    assert [*errors] == [assignment.module.name for assignment in plan.quantized]
    assert all(1e-4 < error < 2e-3 for error in errors.values())  # E4M3 rounds by up to 1/16 of a weight
