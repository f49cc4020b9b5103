"""Blocks of weights that share one scale, for methods that know a format only through its verbs.

A block is `Format.block`: rows x columns, None meaning all of them; the last block of a dimension may be ragged. The
scale tensor has one entry per block, in a (rows of blocks, columns of blocks) matrix, or one in all.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quant.format import Format, Scales

__all__ = ["block_sums", "column", "pick", "reconstruct", "row_range", "spread"]

Block = tuple[int | None, int | None]


def block_sums(values: Tensor, block: Block) -> Tensor:
    """Sum `values` (O, I) over each block: (rows of blocks, columns of blocks)."""
    rows, columns = block[0] or values.shape[0], block[1] or values.shape[1]
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    high, wide = padded.shape[0] // rows, padded.shape[1] // columns
    return padded.reshape(high, rows, wide, columns).sum(dim=(1, 3))


def spread(values: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """One value per block, (rows of blocks, columns of blocks), as one per weight: `shape` (O, I)."""
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    return values.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def column(scales: Scales, block: Block, index: int) -> Scales:
    """The scales of weight column `index`, as the scales of a weight with that one column."""
    at = index // block[1] if block[1] else 0
    return _each(scales, lambda scale: scale[:, at : at + 1] if scale.dim() == 2 else scale)


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
    return fmt.decode(fmt.encode(weight, scales), scales)


def _each(scales: Scales, take: Callable[[Tensor], Tensor]) -> Scales:
    zero_point = None if scales.zero_point is None else take(scales.zero_point)
    return replace(scales, scale=take(scales.scale), zero_point=zero_point)
