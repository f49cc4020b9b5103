"""Experts: those whose weighted outputs are smallest go, and the router forgets them.

REAP (arXiv:2510.13999): the saliency of expert j is the mean, over the tokens routed to it, of g_j(t) |f_j(t)|_2, its
gate times the norm of its output. An expert that no token reaches counts as zero. Nothing is merged or refitted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import Refused
from compress.walk import Block
from compress.walk_block import batches
from compress.walk_model import SeparateExperts

__all__ = ["drop_experts", "prune_experts"]


class _Saliency:
    """Sums over routed tokens for the experts of one layer."""

    def __init__(self, experts: SeparateExperts) -> None:
        count = len(experts.routed)
        self.total = torch.zeros(count, dtype=torch.float64)
        self.tokens = torch.zeros(count, dtype=torch.float64)
        self.activity = torch.zeros(count, dtype=torch.float64)
        self._call: tuple[Tensor, Tensor] | None = None

    def enter(self, _: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
        """Hook in front of all experts: which tokens go where, and with which weight."""
        self._call = (args[1], args[2])

    def leave(self, expert: int, _: nn.Module, args: Any, output: Tensor) -> None:
        """Hook behind one expert's last linear; rows beyond the routed tokens are only shown to it."""
        assert self._call is not None
        index, weights = self._call
        token, rank = torch.where(index == expert)
        norms = output[: len(token)].double().norm(dim=1)
        self.total[expert] += float((norms * weights[token, rank]).sum())
        self.activity[expert] += float(norms.sum())
        self.tokens[expert] += len(token)

    def score(self, method: str) -> Tensor:
        """(E,) REAP's saliency, or for "activation" the mean norm without the gate (Minitron)."""
        total = self.activity if method == "activation" else self.total
        return total / self.tokens.clamp(min=1)


def prune_experts(block: Block, keep: int, method: str) -> list[int]:
    """Drop experts in place; returns the numbers of those that stay.

    Raises:
        Refused: a block without experts.
    """
    if len(block.experts) != 1:
        raise Refused(f"{block.name} has {len(block.experts)} sets of experts, not one: drop no experts")
    saliency = _Saliency(*block.experts.values())
    handles = [handle for experts in block.experts.values() for handle in _watch(experts, saliency)]
    with torch.no_grad():
        for batch in batches(block.inputs):
            block.forward(batch)
    for handle in handles:
        handle.remove()
    random = torch.rand(len(saliency.total), generator=torch.Generator().manual_seed(block.index))
    scores = random if method == "random" else saliency.score(method)
    kept: list[int] = scores.topk(keep).indices.sort().values.tolist()
    drop_experts(block, kept)
    return kept


def _watch(experts: SeparateExperts, saliency: _Saliency) -> Sequence[Any]:
    linears = [experts.get_submodule(f"{expert}.down_proj") for expert in range(len(experts.routed))]
    hooks: list[Callable[..., None]] = [partial(saliency.leave, expert) for expert in range(len(linears))]
    behind = [linear.register_forward_hook(hook) for linear, hook in zip(linears, hooks, strict=True)]
    return [experts.register_forward_pre_hook(saliency.enter), *behind]


def drop_experts(block: Block, kept: Sequence[int]) -> None:
    """Take all other experts out of a block, and their rows out of its router."""
    for name, experts in block.module.named_modules():
        if isinstance(experts, SeparateExperts):
            before = len(experts.routed)
            left = [experts.get_submodule(str(expert)) for expert in kept]
            for expert in range(before):
                delattr(experts, str(expert))
            for number, module in enumerate(left):
                experts.add_module(str(number), module)
            experts.routed = [0] * len(kept)
            _cut_router(block.module.get_submodule(name.rpartition(".")[0]), kept, before)
            return


def _cut_router(parent: nn.Module, kept: Sequence[int], before: int) -> None:
    """Every parameter and buffer beside the experts with a row per expert."""
    for name, module in parent.named_modules():
        if name.split(".")[0] in ("experts", "shared_expert", "shared_experts"):
            continue
        for leaf, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if len(tensor) == before:
                cut = tensor.detach()[list(kept)]
                setattr(module, leaf, nn.Parameter(cut, requires_grad=False) if leaf in module._parameters else cut)
