"""One weight, one format, one method: the steps of a method in order, and a report of what was done."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quant.format import Format, Scales, require_finite
from quant.methods import Method
from quant.methods.blocks import reconstruct
from quant.methods.gptq import Factor, compensated_importance, factorize, gptq
from quant.methods.propagate import corrected
from quant.methods.scale_search import search_scales

__all__ = ["DAMPING", "Inputs", "LayerReport", "Solution", "aim", "importance", "output_error", "prepare", "solve"]

DAMPING = 0.01  # of the mean diagonal of H
SEEN = 256  # rows at most, evenly spaced, that a reported error is told from


@dataclass(frozen=True)
class Inputs:
    """What is known of a layer's inputs, shared by the layers that read them.

    hessian  (I, I) float32, mean of x x^T
    tokens   how many were seen
    factor   of the Hessian, for methods that compensate
    drift    (I, I) float32, mean of (x' - x) x^T, x' the unquantized model's input, for methods that propagate errors
    """

    hessian: Tensor
    tokens: int
    factor: Factor | None = None
    drift: Tensor | None = None

    @property
    def importance(self) -> Tensor:
        """(I,) what a squared error in each input column costs, as `importance` finds it."""
        return self.hessian.diagonal() if self.factor is None else self.factor.importance


@dataclass(frozen=True)
class LayerReport:
    """What was applied to one layer.

    error    output error relative to the output's energy, tr(D H D^T) / tr(W H W^T), told from some rows
    nearest  the same for round-to-nearest, for comparison
    damping  that was used, None without compensation
    dead     input columns that no token activates
    """

    error: float
    nearest: float
    tokens: int
    damping: float | None = None
    dead: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data for run.json."""
        return asdict(self)


@dataclass(frozen=True)
class Open:
    """What learning goes on from, float32: the weight, what was rounded in its place (O, I), and H (I, I)."""

    weight: Tensor
    before: Tensor
    hessian: Tensor

    def rows(self, part: slice) -> "Open":
        """The same of some rows."""
        return Open(self.weight[part], self.before[part], self.hessian)


@dataclass(frozen=True)
class Solution:
    """Codes and scales of one weight, and the float32 weight (O, I) an engine computes with.

    open  for methods that learn
    """

    codes: Tensor
    scales: Scales
    rounded: Tensor
    report: LayerReport
    open: Open | None = None

    def moved(self, fmt: Format, values: Tensor) -> "Solution":
        """The codes of other `values` (O, I) on the same scales, and the error that they have."""
        assert self.open is not None  # asked of methods that learn
        codes = fmt.encode(values, self.scales)
        rounded = fmt.decode(codes, self.scales)
        (error,) = _relative(self.open.weight, (rounded,), self.open.hessian)
        return replace(self, codes=codes, rounded=rounded, report=replace(self.report, error=error))


def prepare(hessian: Tensor, tokens: int, method: Method, drift: Tensor | None = None) -> Inputs:
    """Factorize once for all layers that read these inputs.

    Raises:
        ValueError: statistics that are not finite or not positive definite.
    """
    if not method.compensate:
        return Inputs(hessian, tokens)
    shrunk = _shrunk(hessian, tokens)
    return Inputs(shrunk, tokens, factorize(shrunk, damping=DAMPING), drift if method.propagate else None)


def aim(weight: Tensor, inputs: Inputs) -> Tensor:
    """The weight (O, I) float32 to come close to: the layer's own, or the one that takes back the prefix's error."""
    return weight if inputs.drift is None or inputs.factor is None else corrected(weight, inputs.drift, inputs.factor)


def importance(hessian: Tensor, tokens: int, method: Method) -> Tensor:
    """(I,) what a squared error in each input column costs: all of its energy, or what compensation leaves of it."""
    if not method.compensate:
        return hessian.diagonal()
    return compensated_importance(_shrunk(hessian, tokens), damping=DAMPING)


def _shrunk(hessian: Tensor, tokens: int) -> Tensor:
    """H for few tokens: its diagonal grows by columns / (2 * tokens), because correlations are known only so well.

    Nothing at thousands of tokens a column, and a twentieth off the error on unseen tokens at eight.
    """
    return hessian + torch.diag(hessian.diagonal() * (len(hessian) / (2 * tokens)))


def solve(
    weight: Tensor, fmt: Format, method: Method, inputs: Inputs, *, absmax: Tensor | None, dtype: torch.dtype
) -> Solution:
    """Choose codes and scales for `weight` (O, I) float32.

    Args:
        weight: one layer, or several with the same inputs stacked, where no block of the format crosses them.
        fmt: the format.
        method: the steps to take.
        inputs: of the layer.
        absmax: what `fmt.choose` needs.
        dtype: of the source weight, which float scales are stored in.

    Raises:
        ValueError: a weight or scale is not finite.
    """
    nearest = fmt.choose(weight.to(dtype), absmax)
    require_finite(nearest)
    scales = nearest
    if method.search:
        scales = search_scales(weight, fmt, inputs.importance, absmax, dtype)
    if inputs.factor is None:
        codes, before = fmt.encode(weight, scales), weight
        rounded = fmt.decode(codes, scales)
    else:
        codes, rounded, before = gptq(weight, fmt, scales, inputs.factor)
    require_finite(scales)
    report = _report(weight, rounded, reconstruct(weight, fmt, nearest), inputs)
    return Solution(codes, scales, rounded, report, Open(weight, before, inputs.hessian) if method.learn else None)


def output_error(delta: Tensor, hessian: Tensor) -> Tensor:
    """(O,) delta H delta^T of each row."""
    return ((delta @ hessian) * delta).sum(dim=1)


def _relative(weight: Tensor, others: Sequence[Tensor], hessian: Tensor) -> list[float]:
    """tr(D H D^T) / tr(W H W^T) of each other weight, as SEEN of their rows tell it."""
    every = -(-len(weight) // SEEN)
    energy = output_error(weight[::every], hessian).sum().clamp(min=torch.finfo(torch.float32).tiny)
    return [float(output_error(weight[::every] - other[::every], hessian).sum() / energy) for other in others]


def _report(weight: Tensor, rounded: Tensor, nearest: Tensor, inputs: Inputs) -> LayerReport:
    error, of_nearest = _relative(weight, (rounded, nearest), inputs.hessian)
    report = LayerReport(error, of_nearest, inputs.tokens)
    if inputs.factor is not None:
        report = replace(report, damping=inputs.factor.damping, dead=inputs.factor.dead)
    return report
