"""Each grid against its definition, at every value, every midpoint and the float32 numbers next to it."""

import itertools
import math
import struct

import pytest
import torch

from quant.elements import (
    absmax_scale,
    e2m1,
    e2m1_values,
    e4m3,
    e4m3_values,
    e8m0_values,
    grouped,
    integers,
    largest_magnitude,
    mx_exponent,
    round_to,
)

NAN, INF = float("nan"), float("inf")
E4M3_GRID = [(code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)]
E2M1_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def around(grid: list[float]) -> torch.Tensor:
    """Grid, midpoints, their float32 neighbours, and beyond the end; with both signs."""
    points = torch.tensor([*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid)), grid[-1] * 1.01, 1e30])
    near = torch.cat([points, points.nextafter(torch.tensor(INF)), points.nextafter(torch.tensor(0.0))])
    return torch.cat([near, -near])


def nearest(grid: list[float], x: float) -> int:
    """Code of the nearest grid value; the even code takes a tie; saturating."""
    size = min(abs(x), grid[-1])
    return min(range(len(grid)), key=lambda code: (abs(grid[code] - size), code % 2))


def test_e4m3_is_nearest_ties_to_even():
    x = around(E4M3_GRID)
    expected = [nearest(E4M3_GRID, v) | (0x80 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert e4m3(x).tolist() == expected


def test_e4m3_written_for_the_compiler_gives_the_same_bytes(monkeypatch):
    every_bfloat16 = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    torch.manual_seed(0)
    x = torch.cat([every_bfloat16, around(E4M3_GRID), torch.randn(100_000) * 20, torch.randn(100_000) * 0.01])
    expected = e4m3(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    number = ~x.isnan()
    assert torch.equal(e4m3(x)[number], expected[number])
    assert e4m3_values(e4m3(x[~number])).isnan().all() and e4m3_values(expected[~number]).isnan().all()


def test_e4m3_values_are_the_grid():
    assert e4m3_values(torch.arange(127, dtype=torch.uint8)).tolist() == E4M3_GRID


def test_e2m1_is_nearest_ties_to_even():
    x = around(E2M1_GRID)
    assert e2m1(x).tolist() == [nearest(E2M1_GRID, v) | (8 if v < 0 else 0) for v in x.tolist()]


def test_e2m1_thresholds():
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, -0.25, -0.0])
    assert e2m1(x).tolist() == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 0]


def test_e2m1_values_are_the_grid():
    assert e2m1_values(torch.arange(16, dtype=torch.uint8)).tolist() == E2M1_GRID + [-v for v in E2M1_GRID]


def test_integers_round_half_to_even_and_saturate():
    x = torch.tensor([-1e9, -8.6, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 7.4, 7.6, 1e9])
    assert integers(x, 4).tolist() == [-8, -8, -2, -2, 0, 0, 2, 2, 7, 7, 7]
    assert integers(x, 8).tolist() == [-128, -9, -2, -2, 0, 0, 2, 2, 7, 8, 127]


def exponent_by_definition(absmax: float, largest: float, rule: str) -> int:
    mantissa, exponent = math.frexp(absmax)  # absmax = mantissa * 2^exponent, mantissa in [0.5, 1)
    top_mantissa, top_exponent = math.frexp(largest)
    up = {"floor": False, "even": mantissa >= 0.875, "ceil": mantissa > top_mantissa}[rule]
    return exponent + up - top_exponent


@pytest.mark.parametrize("largest", [6.0, 448.0], ids=["e2m1", "e4m3"])
@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_mx_exponent(rule, largest):
    corners = torch.tensor([1.0, 1.5, 1.75, 1.99, 448.0, 6.0, 0.3, 1e-30, 1e30, 3e38])
    absmax = torch.cat([corners, corners.nextafter(torch.tensor(INF)), corners.nextafter(torch.tensor(0.0))])
    absmax = absmax[absmax.isfinite()]
    expected = [min(max(exponent_by_definition(v, largest, rule), -127), 127) + 127 for v in absmax.tolist()]
    assert mx_exponent(absmax, largest, rule).tolist() == expected


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
def test_mx_exponent_at_the_ends(rule):
    absmax = torch.tensor([0.0, 1e-45, 2.0**-127, INF, NAN])
    assert mx_exponent(absmax, 6.0, rule).tolist() == [0, 0, 0, 255, 255]


def test_ceil_clips_nothing_and_wastes_no_exponent():
    absmax = torch.logspace(-30, 30, 5000)
    power = e8m0_values(mx_exponent(absmax, 6.0, "ceil"))
    assert (absmax <= 6 * power).all() and (absmax > 3 * power).all()


def test_e8m0_values():
    values = e8m0_values(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_round_to_is_the_cast(dtype):
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), dtype=torch.int64).to(torch.int32)
    x = torch.cat([bits.view(torch.float32), (bits & ~0x7FFF).view(torch.float32), torch.tensor([0.0, -0.0, INF])])
    assert torch.equal(round_to(x, dtype).nan_to_num(7.0), x.to(dtype).float().nan_to_num(7.0))
    assert round_to(torch.tensor([NAN]), dtype).isnan().all()


def test_absmax_scale_of_nothing_is_epsilon():
    scale = absmax_scale(torch.tensor([0.0, 1e-45, 448.0, INF, NAN]), 448.0, torch.bfloat16)
    assert scale.dtype is torch.bfloat16
    assert scale[:4].tolist() == [2.0**-7, 2.0**-7, 1.0, INF] and scale[4].isnan()


def test_largest_magnitude():
    assert largest_magnitude(torch.tensor([[1.0, -3.0], [2.0, 0.0]])).item() == 3.0
    assert largest_magnitude(torch.tensor([[1.0, -INF]])).item() == INF
    assert largest_magnitude(torch.tensor([[1.0, NAN]])).isnan()


def test_grouped_takes_narrow_runs_of_columns_as_one_group():
    assert grouped(torch.zeros(3, 64), 32).shape == (3, 2, 32)
    assert grouped(torch.zeros(3, 5), 32).shape == (3, 1, 5)


def test_e4m3_bits_are_the_ones_of_the_specification():
    # OFP8 table 1: 448 = S.1111.110, smallest normal 2^-6 = S.0001.000, smallest 2^-9 = S.0000.001
    assert e4m3(torch.tensor([448.0, 2.0**-6, 2.0**-9, -1.0])).tolist() == [0x7E, 0x08, 0x01, 0xB8]
    assert struct.pack("B", int(e4m3(torch.tensor(NAN)))) == b"\x7f"
