"""Scale search: for every block the scale, and zero point, with the least weighted rounding error.

    minimize over s:  sum_j m_j (w_j - s * round(w_j / s))^2,    m_j the importance of input column j, e.g. E[x_j^2]

Round-to-nearest takes the scale that just covers the largest weight; most of what it loses is won back by looking at
other scales, because a clipped extreme is cheaper than a coarse grid for all the rest. What may be tried follows from
how the format stores its scale:

    integers, symmetric     both signs: two's complement has one code more below zero than above, so the extreme weight
                            may take -8 or -128 ("signed full range", make_qx_quants of llama.cpp)
    integers, asymmetric    scales and neighbouring zero points
    float scales            ratios; a scale is only worth what its mantissa does to the grid's alignment
    E8M0 scales (MX)        neighbouring exponents; a superset of the OCP floor, the even and the ceil rule
    E4M3 scales (NVFP4)     neighbouring codes, which includes the "four over six" choice; and the global divisor

Tables of moves replace one ladder per format. Each pass starts from the best so far and every move is kept block by
block only if it lowers the error, so that the result is never worse than round-to-nearest on this objective. Float
scales end with a least-squares step: given the codes, the best scale is known in closed form.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quant.format import ROWS, Format, Scales
from quant.methods.blocks import block_sums, pick, reconstruct, row_range

__all__ = ["search_scales", "weighted_error"]

Move = Callable[[Scales], Scales]
CHUNK = 1 << 18  # weights a pass works on at once, so that its temporaries stay in the cache


def search_scales(weight: Tensor, fmt: Format, importance: Tensor, absmax: Tensor | None, dtype: torch.dtype) -> Scales:
    """Scales of the least importance-weighted rounding error, never worse than `fmt.choose`.

    Args:
        weight: (O, I) float32.
        fmt: the format.
        importance: (I,) float32, not negative; all ones for plain squared error.
        absmax: what `fmt.choose` needs; None where it needs none.
        dtype: of the source weight, which float scales are stored in.
    """
    start = fmt.choose(weight.to(dtype), absmax)
    if fmt.block[0] is None:
        return _search(weight, fmt, importance, start)
    rows = max(CHUNK // weight.shape[1] // ROWS, 1) * ROWS
    bounds = [(at, min(at + rows, weight.shape[0])) for at in range(0, weight.shape[0], rows)]
    runs = [_search(weight[a:b], fmt, importance, row_range(start, fmt.block, a, b)) for a, b in bounds]
    zero_points = [run.zero_point for run in runs if run.zero_point is not None]
    zero_point = torch.cat(zero_points) if zero_points else None
    return replace(start, scale=torch.cat([run.scale for run in runs]), zero_point=zero_point)


def weighted_error(weight: Tensor, fmt: Format, scales: Scales, importance: Tensor) -> Tensor:
    """The objective per block, (rows of blocks, columns of blocks)."""
    delta = reconstruct(weight, fmt, scales) - weight
    return block_sums(delta.square_().mul_(importance), fmt.block)


def _search(weight: Tensor, fmt: Format, importance: Tensor, best: Scales) -> Scales:
    least = weighted_error(weight, fmt, best, importance)
    for moves in PASSES[_kind(best, fmt)]:
        base = best
        for move in moves:
            best, least = _keep(weight, fmt, importance, (best, least), move(base))
    if best.scale.is_floating_point():
        for _ in range(2):
            refit = least_squares(weight, fmt, importance, best)
            best, least = _keep(weight, fmt, importance, (best, least), refit)
    return best


def _keep(
    weight: Tensor, fmt: Format, importance: Tensor, best: tuple[Scales, Tensor], new: Scales
) -> tuple[Scales, Tensor]:
    error = weighted_error(weight, fmt, new, importance)
    better = error < best[1]  # false for NaN: a scale that under- or overflows is never kept
    return pick(better, new, best[0]), torch.where(better, error, best[1])


def least_squares(weight: Tensor, fmt: Format, importance: Tensor, scales: Scales) -> Scales:
    """The scale that fits the present codes best: s <- s <w, w~> / <w~, w~>, both products weighted."""
    rounded = reconstruct(weight, fmt, scales)
    weighted = rounded * importance
    ratio = block_sums(weighted * weight, fmt.block) / block_sums(weighted * rounded, fmt.block)
    return _multiply(scales, ratio.nan_to_num(1.0).reshape(scales.scale.shape))


def _multiply(scales: Scales, ratio: Tensor | float) -> Scales:
    scale = (scales.scale.float() * ratio).clamp(-_largest(scales.scale), _largest(scales.scale))
    return replace(scales, scale=scale.to(scales.scale.dtype))


def _largest(scale: Tensor) -> float:
    return float(torch.finfo(scale.dtype).max)


def _ratio(ratio: float) -> Move:
    return lambda scales: _multiply(scales, ratio)


def _zero_ratio(ratio: float, shift: int) -> Move:
    """Another scale for the same range: zero points follow, then move by `shift`."""

    def move(scales: Scales) -> Scales:
        assert scales.zero_point is not None  # by `_kind`
        lowest = -8
        moved = lowest + (scales.zero_point.float() - lowest) / ratio + shift
        return replace(_multiply(scales, ratio), zero_point=moved.round().clamp(-8, 7).to(torch.int8))

    return move


def _code(step: int, lowest: int, highest: int) -> Move:
    """The neighbouring value of a scale whose bytes are ordered: E8M0, and E4M3 above zero."""

    def move(scales: Scales) -> Scales:
        code = (scales.scale.view(torch.uint8).int() + step).clamp(lowest, highest)
        return replace(scales, scale=code.to(torch.uint8).view(scales.scale.dtype))

    return move


def _steps(first: float, last: float, count: int) -> list[float]:
    return [first + (last - first) * i / (count - 1) for i in range(count)]


def _kind(scales: Scales, fmt: Format) -> str:
    if scales.zero_point is not None:
        return "zero point"
    if scales.scale.dtype is torch.uint8:
        return "e8m0"
    if scales.scale.dtype is torch.float8_e4m3fn:
        return "e4m3"
    kind = fmt.weights or {}
    name = f"{kind.get('type')}{kind.get('num_bits')}"
    return name if name in PASSES else "table"


# choose() covers the extreme with 7.5 steps of INT4, with 127.5 of INT8, with 448 of E4M3
FINE = [_ratio(1 + sign * step) for step in (0.03, 0.015) for sign in (-1, 1)]
PASSES: dict[str, list[list[Move]]] = {
    "int4": [[_ratio(sign * ratio) for ratio in _steps(0.68, 1.04, 7) for sign in (-1, 1)], FINE],
    "int8": [[_ratio(sign * ratio) for ratio in _steps(0.80, 1.0, 9) for sign in (-1, 1)], FINE],
    "table": [[_ratio(ratio) for ratio in _steps(0.7, 1.05, 8)], FINE],
    "float8": [[_ratio(ratio) for ratio in _steps(0.5, 1.0, 17)], FINE],
    "zero point": [
        [_zero_ratio(ratio, shift) for ratio in _steps(0.66, 1.06, 11) for shift in (-1, 0, 1)],
        [_zero_ratio(1 + step, shift) for step in (-0.02, -0.01, 0.01, 0.02) for shift in (0,)],
    ],
    "e8m0": [[_code(step, 0, 254) for step in (-1, 1, 2)]],
    "e4m3": [[_code(step, 1, 126) for step in range(-6, 7)]],
}
