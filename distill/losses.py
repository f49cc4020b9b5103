"""How far a student's next-token distribution is from its teacher's, computed without holding all logits.

    forward  KL(p ‖ q)                                       p the teacher, q the student
    reverse  KL(q ‖ p)
    jsd      β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q     generalised JSD, Agarwal et al. (arXiv:2306.13649)

Logits of a batch take more memory than the model (tokens × vocabulary × 4 bytes, on both sides), so both sides keep
their final hidden states, and logits exist for some tokens at a time: they are computed, reduced to one number, and
computed again in the backward pass. Nothing is approximated. With a temperature T both distributions are of logits / T
and the divergence is multiplied by T², which keeps the gradient's size (Hinton et al., arXiv:1503.02531).

A sum, not a mean: what is divided by is every token of an optimizer step, over all ranks, which only the loop knows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from compress.head import Head  # brings the model code, which options do not need

__all__ = ["DIVERGENCES", "FORWARD_KL", "Loss", "divergence", "summed_loss"]

LOGITS: Final = 2**24  # float32 logits of one side held at once (64 MiB)


@dataclass(frozen=True)
class Loss:
    """`ce` is the weight of the cross-entropy with the text's own tokens; the divergence has 1 - ce."""

    divergence: str = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    ce: float = 0.0


FORWARD_KL: Final = Loss()


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


DIVERGENCES: Final[dict[str, Callable[[Tensor, Tensor, float], Tensor]]] = {
    "forward": lambda log_p, log_q, _: _kl(log_p, log_q),
    "reverse": lambda log_p, log_q, _: _kl(log_q, log_p),
    "jsd": _jsd,
}


def divergence(teacher: Tensor, student: Tensor, loss: Loss) -> Tensor:
    """Nats per token (T,) between two float32 logits (T, V), times T² of the temperature; `loss.ce` is not in it."""
    scale = loss.temperature
    log_p, log_q = (teacher / scale).log_softmax(-1), (student / scale).log_softmax(-1)
    return DIVERGENCES[loss.divergence](log_p, log_q, loss.beta) * scale**2


def summed_loss(
    student: "tuple[Tensor, Head]",
    teacher: "tuple[Tensor, Head]",
    targets: Tensor,
    *,
    loss: Loss,
    tokens: int | None = None,
) -> Tensor:
    """The loss summed over T tokens, a float32 scalar with a gradient to the student's states and head.

    Args:
        student, teacher: final hidden states (T, hidden) and the head that makes logits of them; vocabularies that
            were padded to different sizes are compared on what both have.
        targets: (T,) the text's next tokens.
        tokens: how many have logits at a time; None: as many as keep 64 MiB.
    """
    states, head = student
    vocabulary = min(head.vocabulary, teacher[1].vocabulary)
    rows = tokens or max(1, LOGITS // vocabulary)

    def part(ours: Tensor, theirs: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            reference = teacher[1].logits(theirs)[:, :vocabulary]
        logits = head.logits(ours)[:, :vocabulary]
        total = divergence(reference, logits, loss).sum() * (1 - loss.ce)
        if not loss.ce:
            return total
        return total + loss.ce * torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

    parts = zip(*(torch.split(whole, rows) for whole in (states, teacher[0], targets)), strict=True)
    sums = [checkpoint(part, *group, use_reentrant=False) for group in parts]
    return torch.stack(sums).sum()
