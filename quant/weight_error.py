"""How far rounding has moved the weights of a layer, told from a sample of rows while they stream by.

||W - W~||² / ||W||² of every thirty-second block of rows, W~ being what an engine computes with. To decode all would
cost as much again as rounding it; the sample costs a few percent, is the same rows whatever the machine and the length
of a run, and is many thousand weights of any layer that is worth a look. This is an error of weights: what it does to
a layer's output depends on the inputs, which round to nearest does not see.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quant.format import Format, Scales

__all__ = ["energies", "relative_error"]

EVERY = 32  # blocks of rows to one that is sampled


def energies(weight: Tensor, codes: Tensor, scales: Scales, fmt: Format, *, start: int = 0) -> Tensor:
    """[||W - W~||², ||W||²] of the sampled rows, float64 (2,).

    Args:
        weight: (R, I), a run of rows; `codes` and `scales` are what `fmt` made of it.
        start: the run's first row in the whole weight, a multiple of `quant.format.ROWS`.
    """
    tall = fmt.block[0] or 1  # where one scale serves all rows, they can be taken one by one
    rows = _sampled(start, weight.shape[0], tall)
    if not len(rows):
        return torch.zeros(2, dtype=torch.float64)
    if fmt.block[0] is not None:
        blocks = _sampled(start // tall, scales.scale.shape[0], 1)
        zero = scales.zero_point
        scales = Scales(scales.scale[blocks], None if zero is None else zero[blocks], scales.global_scale)
    true = weight[rows].float()
    moved = fmt.decode(codes[rows], scales) - true
    return torch.stack([moved.square().sum(dtype=torch.float64), true.square().sum(dtype=torch.float64)])


def relative_error(runs: Sequence[Tensor]) -> float | None:
    """||W - W~||² / ||W||² from the `energies` of all runs; None where every sampled weight is zero."""
    moved, whole = torch.stack([*runs]).sum(dim=0).tolist()
    return moved / whole if whole else None


def _sampled(start: int, count: int, tall: int) -> Tensor:
    """Which of `count` rows from `start` lie in a sampled block of `tall` rows, counted from `start`."""
    rows = torch.arange(start, start + count)
    return rows[rows // tall % EVERY == 0] - start
