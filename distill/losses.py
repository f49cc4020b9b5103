"""How far a student's next-token distribution is from its teacher's, computed without holding all logits.

    forward  KL(p ‖ q)                                       p the teacher, q the student
    reverse  KL(q ‖ p)
    jsd      β KL(p ‖ m) + (1 − β) KL(q ‖ m), m = β p + (1 − β) q     generalised JSD, Agarwal et al. (arXiv:2306.13649)

Logits of a batch take more memory than the model (tokens × vocabulary × 4 bytes, on both sides), so both sides keep
their final hidden states, and logits exist for some tokens at a time: they are computed, reduced to one number, and
computed again in the backward pass. Nothing is approximated. With a temperature T both distributions are of logits / T
and the divergence is multiplied by T², which keeps the gradient's size (Hinton et al., arXiv:1503.02531).

A teacher can also have been asked beforehand (`distill.record`): then p is known for its k likeliest tokens, and the
rest of its mass is one more token, on the student's side too, so that no mass is made up or lost. The divergence of
these k + 1 is a lower bound of the whole, and with k = vocabulary the whole.

A sum, not a mean: what is divided by is every token of an optimizer step, over all ranks, which only the loop knows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from compress.head import Head  # brings the model code, which options do not need

__all__ = ["DIVERGENCES", "FORWARD_KL", "Loss", "States", "Targets", "TopK", "divergence", "summed_loss"]

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


class Targets(Protocol):
    """What a teacher predicts for T tokens, over its first `vocabulary` ids."""

    @property
    def vocabulary(self) -> int: ...

    def split(self, rows: int) -> Sequence["Targets"]:
        """Parts of at most so many tokens."""

    def divergence(self, logits: Tensor, loss: Loss) -> Tensor:
        """Of a student's logits (T, V), as the function of that name; V is not above `vocabulary`."""


@dataclass(frozen=True)
class States:
    """A whole distribution per token: final hidden states (T, hidden), and the head that makes logits of them."""

    states: Tensor
    head: "Head"

    @property
    def vocabulary(self) -> int:
        return self.head.vocabulary

    def split(self, rows: int) -> list["States"]:
        return [States(part, self.head) for part in torch.split(self.states, rows)]

    def divergence(self, logits: Tensor, loss: Loss) -> Tensor:
        with torch.no_grad():
            reference = self.head.logits(self.states)[:, : logits.shape[1]]
        return divergence(reference, logits, loss)


@dataclass(frozen=True)
class TopK:
    """ids (…, k) int32 of the likeliest tokens; log_p (…, k + 1) float32 at the loss's temperature, the rest's last.

    With k = vocabulary nothing is left over, and log_p is (…, k).
    """

    ids: Tensor
    log_p: Tensor
    vocabulary: int

    @staticmethod
    def of(logits: Tensor, k: int, temperature: float) -> "TopK":
        """From logits (T, V) float32."""
        log_p = (logits / temperature).log_softmax(-1)
        ids = log_p.topk(k).indices
        return TopK(ids.int(), _gathered(log_p, ids), logits.shape[-1])

    def __getitem__(self, places: Any) -> "TopK":
        return TopK(self.ids[places], self.log_p[places], self.vocabulary)

    def to(self, device: torch.device) -> "TopK":
        """The same on a device."""
        return TopK(self.ids.to(device), self.log_p.to(device), self.vocabulary)

    def split(self, rows: int) -> list["TopK"]:
        pairs = zip(torch.split(self.ids, rows), torch.split(self.log_p, rows), strict=True)
        return [TopK(ids, log_p, self.vocabulary) for ids, log_p in pairs]

    def divergence(self, logits: Tensor, loss: Loss) -> Tensor:
        log_q = _gathered((logits / loss.temperature).log_softmax(-1), self.ids.long())
        return DIVERGENCES[loss.divergence](self.log_p, log_q, loss.beta) * loss.temperature**2


def _gathered(log_p: Tensor, ids: Tensor) -> Tensor:
    """(T, k + 1): log-probabilities of the ids (T, k), and of all others together where there are others."""
    own = log_p.gather(-1, ids)
    if ids.shape[-1] == log_p.shape[-1]:
        return own
    rest = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([own, rest], dim=-1)


def summed_loss(
    student: "tuple[Tensor, Head]",
    teacher: Targets,
    targets: Tensor,
    *,
    loss: Loss,
    tokens: int | None = None,
) -> Tensor:
    """The loss summed over T tokens, a float32 scalar with a gradient to the student's states and head.

    Args:
        student: final hidden states (T, hidden) and the head that makes logits of them.
        teacher: what it predicts; vocabularies that were padded to different sizes are compared on what both have.
        targets: (T,) the text's next tokens.
        tokens: how many have logits at a time; None: as many as keep 64 MiB.
    """
    states, head = student
    vocabulary = min(head.vocabulary, teacher.vocabulary)
    rows = tokens or max(1, LOGITS // vocabulary)

    def part(ours: Tensor, theirs: Targets, wanted: Tensor) -> Tensor:
        logits = head.logits(ours)[:, :vocabulary]
        total = theirs.divergence(logits, loss).sum() * (1 - loss.ce)
        if not loss.ce:
            return total
        return total + loss.ce * torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

    parts = zip(torch.split(states, rows), teacher.split(rows), torch.split(targets, rows), strict=True)
    sums = [checkpoint(part, *group, use_reentrant=False) for group in parts]
    return torch.stack(sums).sum()
