"""Refinement: lower the output error of codes and scales that some method chose, one exact step at a time.

    minimize tr((W - W~) H (W - W~)^T) over the codes and over the scales in turn

* Codes, by cyclic coordinate descent. With R = W - W~ the best real value of column j, all others fixed, is
  w~_j + (R H)_j / H_jj, so the best code is the nearest one to it. Sources: QuantEase (arXiv 2309.01885), CDQuant
  (arXiv 2406.17542). GPTQ never looks back at a column it rounded; this does.
* Scales, in closed form. With the codes fixed, the output is linear in a row's scales: multiplying the scale of group g
  by r_g gives the normal equations  sum_h A_gh r_h = b_g,  A_gh = w~_g H_gh w~_h^T,  b_g = w~_g (H w^T)_g.

Each step can only lower the objective, up to rounding a scale to the dtype it is stored in; a refit row that does not
is dropped. Scales that are powers of two or shared by several rows stay as they are.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quant.format import Format, Scales
from quant.methods.blocks import column

__all__ = ["descend", "output_error", "refit_scales"]

BLOCK = 128
ROWS = 256  # rows refit at once: (ROWS, I) temporaries stay small


def output_error(delta: Tensor, hessian: Tensor) -> Tensor:
    """(O,) delta H delta^T of each row."""
    return ((delta @ hessian) * delta).sum(dim=1)


def descend(weight: Tensor, rounded: Tensor, fmt: Format, scales: Scales, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """One sweep of coordinate descent over all columns.

    Args:
        weight: (O, I) float32, the target.
        rounded: (O, I) float32, the present W~, on the grid of `scales`.
        fmt: the format.
        scales: kept.
        hessian: (I, I) float32 with a positive diagonal.

    Returns:
        codes (O, I) and the float32 weight they decode to.
    """
    slope = hessian @ (weight - rounded).t()  # (I, O): (R H)_j, kept up to date
    now = rounded.t().contiguous()
    codes = torch.empty_like(fmt.encode(weight, scales)).t().contiguous()
    for start in range(0, len(now), BLOCK):
        stop = min(start + BLOCK, len(now))
        change = torch.empty_like(now[start:stop])
        for at in range(start, stop):
            one = column(scales, fmt.block, at)
            code = fmt.encode((now[at] + slope[at] / hessian[at, at])[:, None], one)
            new = fmt.decode(code, one)[:, 0]
            codes[at] = code[:, 0]
            torch.sub(new, now[at], out=change[at - start])
            now[at] = new
            slope[at + 1 : stop].addr_(hessian[at + 1 : stop, at], change[at - start], alpha=-1)
        slope[stop:] -= hessian[stop:, start:stop] @ change
    return codes.t().contiguous(), now.t().contiguous()


def refit_scales(weight: Tensor, rounded: Tensor, fmt: Format, scales: Scales, hessian: Tensor) -> Scales:
    """Scales of least output error for the present codes; rows where rounding the scale spoils it keep theirs.

    Args:
        weight: (O, I) float32, the target.
        rounded: (O, I) float32, W~ under `scales`.
        fmt: the format; other than float scales of single rows are returned unchanged.
        scales: the present ones.
        hessian: (I, I) float32.
    """
    if fmt.block[0] != 1 or not scales.scale.is_floating_point():
        return scales
    parts = (torch.split(tensor, ROWS) for tensor in (weight, rounded, scales.scale))
    runs = [_refit(w, r, s, hessian) for w, r, s in zip(*parts, strict=True)]
    return replace(scales, scale=torch.cat(runs))


def _refit(weight: Tensor, rounded: Tensor, scale: Tensor, hessian: Tensor) -> Tensor:
    groups = scale.shape[1]
    target = ((weight @ hessian) * rounded).reshape(len(scale), groups, -1).sum(dim=2)  # b: (rows, groups)
    size = rounded.shape[1] // groups
    products = [  # A, one column of groups at a time: (rows, groups)
        ((rounded[:, at : at + size] @ hessian[at : at + size]) * rounded).reshape(len(scale), groups, -1).sum(dim=2)
        for at in range(0, rounded.shape[1], size)
    ]
    normal = torch.stack(products, dim=2).double()
    ridge = normal.diagonal(dim1=1, dim2=2).mean(dim=1) * 1e-6
    normal.diagonal(dim1=1, dim2=2).add_(ridge[:, None] + torch.finfo(torch.float32).tiny)
    ratio = torch.linalg.solve(normal, target.double()[:, :, None])[:, :, 0].float()
    new = (scale.float() * ratio).to(scale.dtype)
    moved = rounded * (new.float() / scale.float()).repeat_interleave(size, dim=1)
    better = output_error(weight - moved, hessian) < output_error(weight - rounded, hessian)
    return torch.where(better[:, None], new, scale)
