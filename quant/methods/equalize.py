"""Equalization: move a positive factor per channel from a layer's input into its weight, so that rounding costs less.

    y = W x = (W diag(s)) (diag(s)^-1 x)

A group of weights shares one step, so columns of unlike size should not be in it together: with s_j = 1 / w_j, w_j the
column's size, they are alike. Against that stands that a column whose errors cost more deserves more of the grid: with
errors weighted by a_j^2, sharing a step costs (sum a_j^2 / s_j^2)(sum w_j^2 s_j^2), which is least, by Cauchy and
Schwarz, at s_j = (a_j / w_j)^(1/2). What a_j is depends on the method. Round-to-nearest pays for E[x_j^2]; GPTQ only
for the part of it that later columns cannot make up, which varies far less, so that evening out the weights is nearly
all there is to do. Powers s = a^p / w^q around both are tried, and the one with the least weighted error after rounding
is kept; no change is among them. AWQ (arXiv 2306.00978) searches p with q = 0, SmoothQuant (arXiv 2211.10438) uses
p + q = 1.

The factor is folded into what produces x (a norm, or the rows of the linear before), so nothing is added at run time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quant.format import Format
from quant.methods.blocks import reconstruct

__all__ = ["POWERS", "equalizing_factor"]

# (p of the importance, q of the weights)
POWERS = ((0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.1, 0.9), (0.25, 0.5), (0.25, 1.0), (0.5, 0.5), (0.5, 0.0))
LIMIT = 1e3  # factors stay within [1/LIMIT, LIMIT]: a channel that is never active says nothing


def equalizing_factor(
    weight: Tensor,
    fmt: Format,
    importance: Tensor,
    *,
    dtype: torch.dtype,
    tie: Callable[[Tensor], Tensor] = lambda values: values,
) -> tuple[Tensor, float]:
    """The factor s (I,) of least output error, and that error relative to s = 1.

    Args:
        weight: (O, I) float32, all layers that read the input stacked.
        fmt: the format.
        importance: (I,) float32 a_j^2, what a squared error in each column costs.
        dtype: of the source weight, which scales are stored in.
        tie: maps a quantity per input channel to its mean over the channels that must share one factor.
    """
    sizes = tie(importance).sqrt()
    columns = tie(weight.square().mean(dim=0)).sqrt()
    factors = [_factor(sizes, columns, p, q) for p, q in POWERS]
    errors = [_error(weight, fmt, importance, factor, dtype) for factor in factors]
    best = min(range(len(factors)), key=errors.__getitem__)  # the first of equals: no change
    return factors[best], errors[best] / errors[0] if errors[0] else 1.0


def _factor(sizes: Tensor, columns: Tensor, p: float, q: float) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    log = p * sizes.clamp(min=tiny).log() - q * columns.clamp(min=tiny).log()
    alive = (sizes > 0) & (columns > 0)
    log = torch.where(alive, log - log[alive].mean(), 0.0) if bool(alive.any()) else torch.zeros_like(log)
    return log.exp().clamp(1 / LIMIT, LIMIT)


def _error(weight: Tensor, fmt: Format, importance: Tensor, factor: Tensor, dtype: torch.dtype) -> float:
    scaled = weight * factor
    absmax = scaled.abs().amax() if fmt.absmax_scope else None
    rounded = reconstruct(scaled, fmt, fmt.choose(scaled.to(dtype), absmax))
    noise = ((rounded - scaled).square() * (importance / factor.square())).sum(dim=1)
    signal = (weight.square() * importance).sum(dim=1)
    return float((noise / signal.clamp(min=torch.finfo(torch.float32).tiny)).sum())  # a row's own size must not matter
