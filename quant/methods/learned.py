"""Learned rounding: weights move by small steps until other codes make the block's output come closer to the source's.

    rounded = decode(encode(v)),   v <- v - rate * step * sign(dL/d rounded)

Rounding has no gradient of its own, so that of the rounded weight is taken for its own (straight through); its sign
alone counts, because weights differ in how they matter by orders of magnitude and all must be able to cross half a
step of their grid. Source: Cheng et al., SignRound (arXiv 2309.05516). Two things differ: descent starts from the
weights that compensation has rounded, each with what it took up of the errors of others, so that codes start as
compensated and those closest to another go first; and scales stay as searched. What L is and which iterate is kept is
the caller's affair.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.format import Format, Scales
from quant.methods.blocks import block_sums, reconstruct, spread

__all__ = ["Latent", "latent"]


@dataclass(frozen=True)
class Latent:
    """The weights v (O, I) float32 of one layer while they are learned, and the step of the grid around each (O, I)."""

    fmt: Format
    scales: Scales
    values: Tensor
    step: Tensor

    @property
    def rounded(self) -> Tensor:
        """(O, I) float32, what an engine would compute with."""
        return reconstruct(self.values, self.fmt, self.scales)

    def descend(self, gradient: Tensor, rate: float) -> None:
        """Move every weight by `rate` steps of its grid against the sign of its gradient (O, I)."""
        self.values.sub_(self.step * gradient.sign(), alpha=rate)


def latent(before: Tensor, fmt: Format, scales: Scales) -> Latent:
    """Where to start: `before` (O, I) float32, the weight that was rounded.

    The step is the mean one of each block of the format, from the error of rounding: even steps of size d leave d^2/12
    on average.
    """
    error = block_sums((reconstruct(before, fmt, scales) - before).square(), fmt.block)
    count = block_sums(torch.ones_like(before), fmt.block)
    step = spread((12 * error / count).sqrt(), fmt.block, (before.shape[0], before.shape[1]))
    return Latent(fmt, scales, before.clone(), step)
