"""Blocks of weights that share one scale, for methods that know a format only through its verbs.

A block is `Format.block`: rows x columns, None meaning all of them; the last block of a dimension may be ragged. The
scale tensor has one entry per block, in a (rows of blocks, columns of blocks) matrix, or one in all.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quant.elements import grouped
from quant.format import Format, Scales

__all__ = ["block_sums", "by_column", "nearest", "pick", "reconstruct", "row_range", "spread"]

Block = tuple[int | None, int | None]


def block_sums(values: Tensor, block: Block) -> Tensor:
    """Sum `values` (O, I) over each block: (rows of blocks, columns of blocks)."""
    rows, columns = block[0] or values.shape[0], block[1] or values.shape[1]
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    high, wide = padded.shape[0] // rows, padded.shape[1] // columns
    return padded.reshape(high, rows, wide, columns).sum(dim=(1, 3))


def spread(values: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """One value per block, (rows of blocks, columns of blocks), as one per weight: `shape` (O, I)."""
    return _by_row(values, block, shape[0]).repeat_interleave(block[1] or shape[1], 1)[:, : shape[1]]


def by_column(values: Tensor, block: Block, shape: tuple[int, int]) -> list[Tensor]:
    """One value per block, (rows of blocks, columns of blocks), as one contiguous (O,) per column of `shape` (O, I)."""
    table = _by_row(values, block, shape[0]).t().contiguous().unbind()
    return [table[index // (block[1] or shape[1])] for index in range(shape[1])]


def row_range(scales: Scales, block: Block, start: int, stop: int) -> Scales:
    """The scales of weight rows `start` to `stop`; `start` begins a block."""
    if block[0] is None:
        return scales
    first, last = start // block[0], -(-stop // block[0])
    return _each(scales, lambda scale: scale[first:last] if scale.dim() == 2 else scale)


def pick(better: Tensor, new: Scales, old: Scales) -> Scales:
    """Block by block, `new` where `better` (rows of blocks, columns of blocks) is true."""
    zero_point = None
    if new.zero_point is not None and old.zero_point is not None:
        zero_point = torch.where(better, new.zero_point, old.zero_point)
    chosen = better.reshape(old.scale.shape)
    return replace(old, scale=torch.where(chosen, new.scale, old.scale), zero_point=zero_point)


def reconstruct(weight: Tensor, fmt: Format, scales: Scales) -> Tensor:
    """`weight` rounded to nearest under `scales`: what an engine would compute with, float32 (O, I)."""
    groups = grouped(weight, fmt.block[1] or weight.shape[1])
    multiplier = _by_row(fmt.multiplier(scales), fmt.block, len(weight)).unsqueeze(2)
    zero = scales.zero_point
    zero = None if zero is None else _by_row(zero, fmt.block, len(weight)).unsqueeze(2)
    return nearest(groups, fmt, multiplier, zero).flatten(1)


def nearest(values: Tensor, fmt: Format, multiplier: Tensor, zero: Tensor | None) -> Tensor:
    """float32 `values` rounded to the format's grid under multipliers and zero points that broadcast to their shape."""
    scaled = values / multiplier
    return fmt.nearest(scaled).mul_(multiplier) if zero is None else (fmt.nearest(scaled + zero) - zero) * multiplier


def _by_row(values: Tensor, block: Block, rows: int) -> Tensor:
    """(rows of blocks, columns of blocks) as (O, columns of blocks)."""
    return values if block[0] == 1 else values.repeat_interleave(block[0] or rows, 0)[:rows]


def _each(scales: Scales, take: Callable[[Tensor], Tensor]) -> Scales:
    zero_point = None if scales.zero_point is None else take(scales.zero_point)
    return replace(scales, scale=take(scales.scale), zero_point=zero_point)
