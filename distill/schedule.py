"""How fast and how long: learning rate by step, and which rows a step learns from; both pure functions of the step.

Nothing of this is state, so a run that is continued needs only the weights, the moments and its step to go on as if it
had never stopped, and any number of ranks reads the same rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Schedule", "learning_rate", "mixed_order"]


@dataclass(frozen=True)
class Schedule:
    """The fields of `distill.options.Training`, as plain data."""

    steps: int
    batch: int
    micro_batch: int
    learning_rate: float
    warmup: float = 0.05
    final_rate: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: str = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0


def learning_rate(schedule: Schedule, step: int) -> float:
    """The rate of step 0 … steps - 1: linear up to the whole, then a cosine down to `final_rate` of it."""
    rising = round(schedule.warmup * schedule.steps)
    if step < rising:
        return schedule.learning_rate * (step + 1) / (rising + 1)
    done = (step - rising) / max(1, schedule.steps - rising)
    lowest = schedule.final_rate
    return schedule.learning_rate * (lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2)


def mixed_order(counts: Sequence[int], weights: Sequence[float], total: int, seed: int) -> Tensor:
    """(total,) rows to read one after the other, from sources whose rows lie one source after the other.

    Every prefix holds each source in proportion to its weight, to within one row or so; a source whose rows are used up
    begins again in another order.
    """
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    owed = torch.arange(1, total + 1)[:, None] * shares
    taken = torch.zeros(len(counts), dtype=torch.int64)
    order = torch.empty(total, dtype=torch.int64)
    starts = torch.tensor([0, *counts]).cumsum(0)
    shuffled: dict[tuple[int, int], Tensor] = {}
    for i in range(total):
        source = int((owed[i] - taken).argmax())
        epoch, place = divmod(int(taken[source]), counts[source])
        if (source, epoch) not in shuffled:
            generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch + source)
            shuffled[source, epoch] = torch.randperm(counts[source], generator=generator)
        order[i] = starts[source] + shuffled[source, epoch][place]
        taken[source] += 1
    return order
