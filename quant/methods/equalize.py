"""Equalization: move a positive factor per channel from a layer's input into its weight, so that rounding costs less.

    y = W x = (W diag(s)) (diag(s)^-1 x)

A group of weights shares one step, so columns of unlike size should not be in it together: with s_j = 1 / w_j, w_j the
column's size, they are alike. Against that stands that a column whose errors cost more deserves more of the grid: with
errors weighted by a_j^2, sharing a step costs (sum a_j^2 / s_j^2)(sum w_j^2 s_j^2), which is least, by Cauchy and
Schwarz, at s_j = (a_j / w_j)^(1/2). What a_j is depends on the method. Round-to-nearest pays for E[x_j^2]; GPTQ only
for the part of it that later columns cannot make up, which varies far less, so that evening out the weights is nearly
all there is to do. Powers s = a^p / w^q around both are tried, and the one with the least weighted error after rounding
is kept; no change is among them. AWQ (arXiv 2306.00978) searches p with q = 0.

Where a format rounds the inputs too, they have the same trouble the other way round: a token shares one step among its
channels, and 1/s evens those out. The error of both is then counted on a sample of inputs, and powers that SmoothQuant
(arXiv 2211.10438) takes, of the channels' largest values and with p + q = 1, are tried as well.

The factor is folded into what produces x (a norm, or the rows of the linear before), so nothing is added at run time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quant.activations import activation_quantizer, input_scale
from quant.format import ROWS, Format
from quant.methods.blocks import reconstruct

__all__ = ["POWERS", "equalizing_factor"]

# (p of the importance, q of the weights)
POWERS = ((0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (0.1, 0.9), (0.25, 0.5), (0.25, 1.0), (0.5, 0.5), (0.5, 0.0))
SMOOTHING = ((0.4, 0.6), (0.5, 0.5), (0.6, 0.4), (0.75, 0.25), (0.85, 0.15))  # p of the largest inputs
ENOUGH = 512  # rows
LIMIT = 1e3  # factors stay within [1/LIMIT, LIMIT]: a channel that is never active says nothing


def equalizing_factor(
    weight: Tensor,
    fmt: Format,
    importance: Tensor,
    *,
    inputs: Tensor,
    dtype: torch.dtype,
    tie: Callable[[Tensor], Tensor] = lambda values: values,
) -> tuple[Tensor, float]:
    """The factor s (I,) of least output error, and that error relative to s = 1.

    Args:
        weight: (O, I) float32, all layers that read the input stacked.
        fmt: the format.
        importance: (I,) float32 a_j^2, what a squared error in each column costs.
        inputs: (n, I) float32, a sample of them; read only where the format rounds its inputs.
        dtype: of the source weight, which scales are stored in.
        tie: maps a quantity per input channel to its mean over the channels that must share one factor.
    """
    sizes = tie(importance).sqrt()
    columns = tie(weight.square().mean(dim=0)).sqrt()
    weight = _some_rows(weight)
    factors = [_factor(sizes, columns, p, q) for p, q in POWERS]
    if fmt.activations:
        largest = tie(inputs.square().amax(dim=0)).sqrt()
        factors += [_factor(largest, columns, p, q) for p, q in SMOOTHING]
    errors = [_error(weight, fmt, importance, factor, dtype) for factor in factors]
    if fmt.activations:
        noises = [_input_noise(weight, fmt, inputs, factor) for factor in factors]
        errors = [error + noise for error, noise in zip(errors, noises, strict=True)]
    size = (weight.square() * importance).sum(dim=1).clamp(min=torch.finfo(torch.float32).tiny)  # rows count alike
    sums = [float((error / size).sum()) for error in errors]
    best = min(range(len(factors)), key=sums.__getitem__)  # the first of equals: no change
    return factors[best], sums[best] / sums[0] if sums[0] else 1.0


def _some_rows(weight: Tensor) -> Tensor:
    """At most about ENOUGH rows (O, I), in evenly spaced runs of ROWS: which factor is best, a part of them tells."""
    return torch.cat(torch.split(weight, ROWS)[:: -(-len(weight) // ENOUGH)])


def _factor(sizes: Tensor, columns: Tensor, p: float, q: float) -> Tensor:
    tiny = torch.finfo(torch.float32).tiny
    log = p * sizes.clamp(min=tiny).log() - q * columns.clamp(min=tiny).log()
    alive = (sizes > 0) & (columns > 0)
    log = torch.where(alive, log - log[alive].mean(), 0.0) if bool(alive.any()) else torch.zeros_like(log)
    return log.exp().clamp(1 / LIMIT, LIMIT)


def _error(weight: Tensor, fmt: Format, importance: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """(O,) squared output error of each row from rounding the weights."""
    scaled = weight * factor
    absmax = scaled.abs().amax() if fmt.absmax_scope else None
    rounded = reconstruct(scaled, fmt, fmt.choose(scaled.to(dtype), absmax))
    return ((rounded - scaled).square() * (importance / factor.square())).sum(dim=1)


def _input_noise(weight: Tensor, fmt: Format, inputs: Tensor, factor: Tensor) -> Tensor:
    """(O,) the same from rounding the inputs."""
    assert fmt.activations is not None
    if not bool(inputs.any()):
        return weight.new_zeros(len(weight))
    scaled = inputs / factor
    rounding = activation_quantizer(
        fmt.activations, scale=input_scale(fmt.activations, scaled.abs().amax(), inputs.dtype)
    )
    noise = rounding(scaled).nan_to_num() - scaled  # a token that is all zero has no scale
    return (noise @ (weight * factor).t()).square().mean(dim=0)
