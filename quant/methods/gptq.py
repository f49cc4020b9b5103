"""GPTQ: round one input column at a time and let the columns still open take up each error.

    minimize tr((W - W~) H (W - W~)^T),    H = sum over calibration tokens of x x^T

    H^-1 = U^T U, U upper triangular
    for column j:   q_j = encode(w_j);   e = (w_j - w~_j) / U_jj;   w_k <- w_k - e U_jk  for all k > j

Source: Frantar et al., GPTQ (arXiv 2210.17323), algorithm 1 and section 3.3, whose "lazy batches" are the BLOCK below.
Three things differ from the usual code, each because it measures better or says more:

* Scales are given and fixed before the first column, one per original block. So columns can be rounded in order of
  falling H_jj ("activation order") while the checkpoint needs no g_idx: the order leaves no trace on disk.
* U comes from one Cholesky factorization: with J the reversal of the order, J H J = L L^T gives U = (J L J)^-1. Forming
  H^-1 first, as is common, squares the condition number. The factorization is in float64: it costs I^3/3, as much as
  rounding I/6 rows, and at 1 % damping the condition number of a real H passes 1e5, which leaves float32 two digits.
  That of L is the root of it, so that inverting L in float32 keeps four.
* A column that no token activates keeps its weights, rounded to nearest, instead of being set to zero: other inputs may
  use it. Damping grows tenfold until the factorization succeeds; the amount that was used is in the report.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.format import Format, Scales
from quant.methods.blocks import by_column, nearest

__all__ = ["Factor", "compensated_importance", "factorize", "gptq"]

BLOCK = 64  # columns whose updates to the rest are gathered into one matrix product
DAMPING_LIMIT = 1.0  # of the mean diagonal; beyond it H says nothing


@dataclass(frozen=True)
class Factor:
    """What GPTQ needs of H, shared by all weights that read the same input.

    order    (I,) int64, original column at each step
    upper    (I, I) float32 U in that order, H^-1 = U^T U
    damping  fraction of the mean diagonal that was added
    dead     number of columns no token activates
    """

    order: Tensor
    upper: Tensor
    damping: float
    dead: int

    @property
    def importance(self) -> Tensor:
        """(I,) what an error in each column costs once later columns have made up for it: 1 / U_jj^2."""
        return _unordered(self.upper.diagonal().square().reciprocal(), self.order)


def factorize(hessian: Tensor, *, damping: float) -> Factor:
    """Order the columns by falling diagonal and factorize the damped inverse.

    Args:
        hessian: (I, I), symmetric, positive semidefinite, any float dtype.
        damping: fraction of the mean diagonal to add, > 0.

    Raises:
        ValueError: H is not finite, or not positive definite even with the largest damping.
    """
    order, lower, damping = _cholesky(hessian, damping, torch.float64)
    upper = _invert(lower.float()).flip(0, 1)
    return Factor(order, upper, damping, int((hessian.diagonal() == 0).sum()))


def compensated_importance(hessian: Tensor, *, damping: float) -> Tensor:
    """`factorize(...).importance` from L alone, whose diagonal is 1 / U_jj, in float32: enough to compare by."""
    order, lower, _ = _cholesky(hessian, damping, torch.float32)
    return _unordered(lower.diagonal().flip(0).square(), order)


def _cholesky(hessian: Tensor, damping: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """The order of the columns, L of the damped H in the opposite order, and the damping that it took."""
    if not bool(hessian.isfinite().all()):
        raise ValueError("the input statistics are not finite: the calibration activations hold NaN or inf")
    diagonal = hessian.diagonal().to(dtype)
    order = torch.argsort(diagonal, descending=True, stable=True)
    last_first = order.flip(0)
    matrix = hessian[last_first][:, last_first].to(dtype)
    dead = matrix.diagonal() == 0
    matrix.diagonal()[dead] = 1.0 if bool(dead.all()) else diagonal.mean()
    mean = matrix.diagonal().mean()
    while damping <= DAMPING_LIMIT:
        damped = matrix.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            return order, lower, damping
        damping *= 10
    raise ValueError(f"the input statistics are not positive definite even with damping {damping / 10:g}")


def gptq(weight: Tensor, fmt: Format, scales: Scales, factor: Factor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes that minimize the output error under fixed scales.

    Args:
        weight: (O, I) float32; the rows of layers with the same input may be stacked.
        fmt: the format.
        scales: of the blocks of `weight`, in the original column order.
        factor: of the input statistics.

    Returns:
        codes as `fmt.encode` gives them, (O, I); the float32 weight that they decode to, (O, I); and the one that was
        rounded to them, (O, I): `weight` with what each column took up of the errors before it.
    """
    work = weight.float().t()[factor.order]  # (I, O) and in order: a column is contiguous
    shape = (weight.shape[0], weight.shape[1])
    multipliers = by_column(fmt.multiplier(scales), fmt.block, shape)
    zeros = None if scales.zero_point is None else by_column(scales.zero_point, fmt.block, shape)
    columns, pivots = factor.order.tolist(), factor.upper.diagonal().tolist()
    lower = factor.upper.t().contiguous()
    for start in range(0, len(columns), BLOCK):
        stop = min(start + BLOCK, len(columns))
        errors = torch.empty_like(work[start:stop])
        for at in range(start, stop):
            now, done, index = work[at], at - start, columns[at]
            now.addmv_(errors[:done].t(), lower[at, start:at], alpha=-1)
            rounded = nearest(now, fmt, multipliers[index], None if zeros is None else zeros[index])
            torch.sub(now, rounded, out=errors[done]).div_(pivots[at])
        work[stop:].addmm_(lower[stop:, start:stop], errors, alpha=-1)
    place = torch.argsort(factor.order)
    before = work[place].t().contiguous()
    codes = fmt.encode(before, scales)
    return codes, fmt.decode(codes, scales), before


def _invert(lower: Tensor) -> Tensor:
    """The inverse of a lower triangular matrix, by halves: [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]."""
    size, half = len(lower), len(lower) // 2
    if size <= BLOCK:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        small: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
        return small
    inverse = torch.zeros_like(lower)
    first, last = _invert(lower[:half, :half]), _invert(lower[half:, half:])
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[half:, :half] = -(last @ (lower[half:, :half] @ first))
    return inverse


def _unordered(values: Tensor, order: Tensor) -> Tensor:
    result = torch.empty_like(values)
    result[order] = values
    return result
