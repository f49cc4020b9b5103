"""Scores that are cheap: Minitron's activation score, and chance as a control. Units with the highest stay.

Minitron (arXiv:2407.14679): an input channel counts as much as it is active, the L2 norm over sequences of the mean
over tokens of |a|; a head by the L2 norm over its channels. No weights enter, and nothing makes up for what goes.
"""

import torch
from torch import Tensor

from prune.obs import Units

__all__ = ["activation_score", "random_score", "top_units"]


def activation_score(activity: Tensor, units: Units) -> Tensor:
    """(U,) from `activity` (I,), the sum over sequences of the squared mean magnitude."""
    return activity.reshape(units.count, units.size).sum(dim=1).sqrt()


def random_score(units: Units, seed: int) -> Tensor:
    """(U,) uniform, the same for the same seed."""
    return torch.rand(units.count, generator=torch.Generator().manual_seed(seed))


def top_units(scores: Tensor, units: Units, keep: int) -> Tensor:
    """The units (keep,) int64 ascending with the highest scores, equally many of each section."""
    by_section = scores.reshape(units.sections, -1)
    best = by_section.topk(keep // units.sections, dim=1).indices
    first = torch.arange(units.sections, device=best.device)[:, None] * by_section.shape[1]
    return (best + first).flatten().sort().values
