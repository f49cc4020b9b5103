"""Weights that are rounded whenever they are used, so that training finds weights which lose little when rounded.

W̃ = Q(bf16(W)) + W − stopgradient(W): the forward pass sees to the bit what the format stores, the backward pass W (the
straight-through estimator, Bengio et al., arXiv:1308.3432). The cast to the stored dtype is part of it, so rounding the
written checkpoint to nearest gives exactly the weights that training saw. Weights only; inputs stay in 16 bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import RecipeError
from quant.format import Format
from quant.plan import Assignment

__all__ = ["plain_weights", "round_weights"]


class _Rounding(nn.Module):
    """W (O, I) float32 -> W̃ of the same shape."""

    def __init__(self, fmt: Format, dtype: torch.dtype) -> None:
        super().__init__()
        self.fmt, self.dtype = fmt, dtype

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            stored = weight.to(self.dtype)
            scales = self.fmt.choose(stored, None)
            rounded = self.fmt.decode(self.fmt.encode(stored, scales), scales).to(weight.dtype)
        return rounded + (weight - weight.detach())


def round_weights(model: nn.Module, assignments: Sequence[Assignment]) -> None:
    """Round the weights of these modules from now on.

    Raises:
        RecipeError: a scale that fused layers share, or experts that are no modules of their own.
    """
    present = dict(model.named_modules())
    for assignment in assignments:
        name, fmt = assignment.module.name, assignment.fmt
        if fmt is None:
            continue
        if name not in present or fmt.absmax_scope:
            raise RecipeError(f"stages: {name} cannot be trained under {fmt.name}: leave distill.quantized out")
        parametrize.register_parametrization(present[name], "weight", _Rounding(fmt, assignment.module.weight.dtype))


def plain_weights(model: nn.Module) -> None:
    """Undo `round_weights`: the weights are again what training moves, not rounded."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
