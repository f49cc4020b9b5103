"""Learned rounding of a block: all its linears at once, towards what the unquantized model's block outputs.

The loss is the mean over tokens of |y - y'|^2 / |y|^2, y the output of the source's block on the source's own hidden
states: relative by token, as the norm behind the block sees it, so that the few tokens that carry huge activations do
not decide for all others. Each iteration looks at one batch of tokens; now and then the loss on all of them is taken,
and the weights with the least are kept, those that compensation left included: learning never makes the block worse.

Under torchrun the rank that holds an iteration's batch computes its gradient and all ranks receive it, so that weights
are the same everywhere, and the same as of one process.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compress.walk_block import Block, batches, hooked, rank_of
from quant.format import Format
from quant.methods.learned import latent
from quant.methods.solve import Solution

__all__ = ["Learning", "learn_block"]

RATE = 0.005  # of a step of the grid, at the first iteration; falls to zero
LOOKS = 2  # at most, at the loss on all tokens; the last is after the last iteration


@dataclass(frozen=True)
class Learning:
    """How to learn: so many iterations, under these formats and roundings of inputs, each by the linear's name."""

    iterations: int
    formats: Mapping[str, Format]
    roundings: Mapping[str, Callable[[Tensor], Tensor] | None]


def learn_block(
    block: Block, solutions: Mapping[str, Solution], how: Learning
) -> tuple[dict[str, Solution], dict[str, Any]]:
    """Other codes for `solutions` where they lower the loss, left in the block, and what was won.

    Args:
        block: with its inputs in place and a finished twin, whose inputs now are the outputs to come close to.
        solutions: by name, of linears whose rounded weights the block holds.
    """
    latents = {
        name: latent(found.open.before, how.formats[name], found.scales)
        for name, found in solutions.items()
        if found.open is not None
    }
    best, every = None, -(-how.iterations // LOOKS)
    with _learning(block, how) as weights:
        first = least = _loss(block)
        for at, batch in enumerate(_order(block, how.iterations)):
            gradients = _gradients(block, weights, batch)
            for name, moved in latents.items():
                moved.descend(gradients[name], RATE * (1 - at / how.iterations))
                weights[name].data.copy_(moved.rounded)
            if (how.iterations - 1 - at) % every == 0 and (loss := _loss(block)) < least:
                least, best = loss, {name: moved.values.clone() for name, moved in latents.items()}
    learnt = dict(solutions)
    if best is not None:
        learnt = {name: found.moved(how.formats[name], best[name]) for name, found in solutions.items()}
    for name, found in learnt.items():
        block.linears[name].weight.data.copy_(found.rounded)
    return learnt, {"iterations": how.iterations, "loss_before": first, "loss_after": least}


@contextmanager
def _learning(block: Block, how: Learning) -> Iterator[dict[str, Tensor]]:
    """The weights to learn, by name; inputs are rounded on the way, and let gradients through."""
    weights = {name: block.linears[name].weight for name in how.formats}
    roundings = {block.linears[name]: rounding for name, rounding in how.roundings.items() if rounding}
    hooks = {linear: partial(_rounded, rounding) for linear, rounding in roundings.items()}
    for weight in weights.values():
        weight.requires_grad_(True)
    with hooked(hooks):
        yield weights
    for weight in weights.values():
        weight.requires_grad_(False)


class _Through(torch.autograd.Function):
    """A rounding whose gradient is that of its input: the value is exactly the rounded one."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _rounded(rounding: Callable[[Tensor], Tensor], linear: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any]:
    return (_Through.apply(args[0], rounding),)  # type: ignore[no-untyped-call]


def _distance(output: Tensor, target: Tensor) -> Tensor:
    """Sum over tokens of |y - y'|^2 / |y|^2."""
    size = target.square().sum(dim=-1).clamp(min=torch.finfo(target.dtype).tiny)
    return ((output - target).square().sum(dim=-1) / size).sum()


@torch.no_grad()
def _loss(block: Block) -> float:
    """The mean over all ranks' tokens."""
    pairs = _pairs(block)
    sums = [float(_distance(block.forward(x), y.to(block.device))) for x, y in pairs]
    total = torch.tensor([sum(sums), block.inputs.shape[:2].numel()], dtype=torch.float64, device=block.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total[0] / total[1])


def _pairs(block: Block) -> list[tuple[Tensor, Tensor]]:
    assert block.twin is not None  # the walk was asked for it
    return [*zip(batches(block.inputs), batches(block.twin.inputs), strict=True)]


def _order(block: Block, iterations: int) -> list[int]:
    """The batch of each iteration, of all ranks' batches: every one comes once before any comes again."""
    count = torch.tensor(len(batches(block.inputs)), device=block.device)
    if dist.is_initialized():
        dist.all_reduce(count)
    generator = torch.Generator().manual_seed(block.index)
    rounds = [torch.randperm(int(count), generator=generator) for _ in range(-(-iterations // int(count)))]
    return torch.cat(rounds)[:iterations].tolist()


def _gradients(block: Block, weights: Mapping[str, Tensor], batch: int) -> dict[str, Tensor]:
    """Of the loss on a batch, from the rank that holds it."""
    rank, ranks = rank_of()
    if batch % ranks == rank:
        x, y = _pairs(block)[batch // ranks]
        loss = _distance(block.forward(x), y.to(block.device))
        found = torch.autograd.grad(loss, [*weights.values()], allow_unused=True, materialize_grads=True)
    else:
        found = tuple(torch.zeros_like(weight) for weight in weights.values())
    if dist.is_initialized():
        for gradient in found:
            dist.all_reduce(gradient)
    return dict(zip(weights, found, strict=True))
