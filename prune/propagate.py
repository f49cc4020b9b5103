"""Propagated errors: aim a block's last linear at what the whole model puts out there, not at its own old outputs.

Behind pruned blocks a block reads other hidden states than in the model as it was. Its last linear W, whose outputs are
added to the residual stream, can take some of that back. Let a be what it reads, y the block's outputs with W as it is,
y' those of the same block on the hidden states of the whole model, H = E a a^T and G = E (y' - y) a^T. Then

    E |y' - y + W a - W~ a|^2  =  E |(W* - W~) a|^2 + const,    W* = W + G H^-1

so the refit of W* in place of W brings the stream itself back, the error of all blocks in front included. (Quantization
does the same within a layer: `quant/methods/propagate.py`; GPTAQ, arXiv 2504.02692.) G is estimated from as few tokens
as H and fits their noise too, so the share STRENGTH is taken. Behind a dropped layer y' is what that layer put out, and
the gap is all that it did: there the whole of G is taken.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.walk_block import Block, batches, check_finite, hooked
from compress.walk_statistics import Statistics

__all__ = ["DROPPED", "STRENGTH", "observe_gap", "spans_of", "takes_gap"]

# on the demo model, a tenth pruned on 16,000 tokens: KL .0995 with 0, .0865 with 0.5, .0902 with 1
STRENGTH = 0.5
DROPPED = 1.0  # layer 25 of the demo model dropped: KL .1514 with 0, .0857 with 0.5, .0652 with 1


def spans_of(kept: Sequence[int], total: int) -> list[range]:
    """For each layer that stays, those of all whose work it does: itself and the dropped ones behind it."""
    starts = [0, *kept[1:]]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], total], strict=True)]


def takes_gap(block: Block, name: str) -> bool:
    """Whether the block's output is that of the linear `name` plus what does not depend on it; false behind a norm."""
    hidden, linear = block.inputs[:1], block.linears[name]
    with torch.no_grad():
        whole, read = _forward(block, linear, hidden)
        weight = linear.weight.detach().clone()
        linear.weight.zero_()
        without, _ = _forward(block, linear, hidden)
        linear.weight.copy_(weight)
    added = read @ weight.t()
    return torch.allclose(whole - without, added, rtol=1e-3, atol=1e-3 * float(added.abs().max()))


def observe_gap(block: Block, name: str) -> tuple[Statistics, Tensor]:
    """What the linear `name` reads over all tokens, and G (O, I) float32; changes nothing but the twin's progress.

    Args:
        block: with its twin, and of which `takes_gap` is true.

    Raises:
        InputError: an activation that is not finite.
    """
    assert block.twin is not None
    linear = block.linears[name]
    statistics = Statistics(linear.in_features, block.device)
    total = torch.zeros(linear.out_features, linear.in_features, dtype=torch.float64, device=block.device)
    block.twin.finish()
    with torch.no_grad():
        for hidden, exact in zip(batches(block.inputs), batches(block.twin.inputs), strict=True):
            found, read = _forward(block, linear, hidden)
            statistics.add(read)
            total += (exact.to(found.device) - found).flatten(0, 1).t() @ read.flatten(0, 1)
    check_finite(name, statistics.absmax)
    return statistics, (total / statistics.tokens).float()


def _forward(block: Block, linear: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The block's outputs (n, T, D) and what the linear read (n, T, I)."""
    read: list[Tensor] = []
    with hooked({linear: lambda _, args: read.append(args[0])}):
        found = block.forward(hidden)
    return found, read[0]
