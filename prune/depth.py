"""Which layers stay: removed one after the other, each time the one whose absence changes the output least.

Greedy by KL (as SLEB, arXiv:2402.09025, does by perplexity): every candidate is the model without one more layer, its
damage KL(source || candidate) on calibration tokens. All candidates go through the model together, one block in memory
at a time: the candidate without layer i leaves the common path there, so blocks in front of it are computed once.
After the first round only the layers that looked cheapest are tried again. `cosine` (ShortGPT, arXiv:2403.03853) costs
one pass: 1 - cos between what enters and what leaves a layer, which is known to be blind to what math needs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.progress import Advance, step
from compress.walk_journal import Journal
from compress.walk_model import Skeleton
from prune.streamed import Streamed, divergence

__all__ = ["SCORES", "TOKENS", "choose_layers"]

SCORES = ("kl", "cosine")
TOKENS = 2048  # of calibration that a candidate is judged on
RETRIED = 8  # candidates after the first round, beside those that are still to be removed


def choose_layers(
    skeleton: Skeleton, tokens: Tensor, keep: int, score: str, journal: Journal, device: torch.device
) -> list[int]:
    """The layers that stay, ascending.

    Args:
        tokens: (N, T) int64, about `TOKENS` of calibration.
        score: "kl", "cosine" or "random".
        journal: of the layers removed so far, in their order, whatever the number to keep was.

    Raises:
        CheckpointError: the blocks, the final norm or the head are not found.
        Refused: a divergence that is not finite.
    """
    saved = journal.load("layers")
    removed: list[int] = saved[1]["removed"] if saved else []
    total = len(skeleton.blocks)
    if score == "kl" and len(removed) >= total - keep:
        return sorted({*range(total)}.difference(removed[: total - keep]))
    model = Streamed(skeleton, tokens, device)
    if score != "kl":
        scores = _cosines(model) if score == "cosine" else torch.rand(total, generator=torch.Generator().manual_seed(0))
        return sorted(scores.topk(keep).indices.tolist())
    source = model.final()
    candidates = saved[1]["candidates"] if saved else [*range(total)]
    with step(f"which layers to drop, {total - keep} of {total}", (total - keep - len(removed)) * total) as advance:
        while len(removed) < total - keep:
            tried = [layer for layer in candidates if layer not in removed]
            damage = _damage(model, source, removed, tried, advance)
            order = sorted(damage, key=lambda layer: damage[layer])
            removed = [*removed, order[0]]
            candidates = sorted(order[: RETRIED + total - keep])
            journal.save("layers", {"removed": torch.tensor(removed)}, {"removed": removed, "candidates": candidates})
    return sorted({*range(total)}.difference(removed))


@torch.no_grad()
def _damage(
    model: Streamed, source: Tensor, removed: Sequence[int], tried: Sequence[int], advance: Advance
) -> dict[int, float]:
    """KL(source || model without the removed layers and one of those that are tried), nats per token, by the latter."""
    common = model.start
    streams: dict[int, Tensor] = {}
    for layer in range(len(model.skeleton.blocks)):
        if layer not in removed:
            block = model.block(layer)
            streams = {candidate: block(hidden) for candidate, hidden in streams.items()}
            if layer in tried:
                streams[layer] = common
            common = block(common)
        advance(1)
    found = divergence((source, model.head), [(model.norm(hidden), model.head) for hidden in streams.values()])
    return dict(zip(streams, found, strict=True))


@torch.no_grad()
def _cosines(model: Streamed) -> Tensor:
    """(L,) mean over tokens of 1 - cos(what enters, what leaves) of every layer."""
    found, hidden = [], model.start
    for layer in range(len(model.skeleton.blocks)):
        output = model.block(layer)(hidden)
        found.append(1 - F.cosine_similarity(hidden, output, dim=-1).mean())
        hidden = output
    return torch.stack(found)
