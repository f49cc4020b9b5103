"""What a gate can tell apart before anything is computed: so many samples, such a margin, an assumed spread.

A margin that the samples cannot resolve ends INCONCLUSIVE after hours, so a dry run says it first. Of accuracy the
spread is the share of flipped answers; of likelihoods it is the standard deviation of a sample's loss per token, which
grows with the damage. The figures of `SPREADS` were measured on a model of 135 million parameters with 256 tokens a
document and are a scale, not a promise. Looks before the last are left out: they save samples, they add no power.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, ndtr, ndtri, xlogy

from evals.look import fewest
from evals.metric import Metric
from evals.statistics import POWER, spend, tango_score

__all__ = [
    "FLIPS",
    "SPREADS",
    "Resolution",
    "accuracy_inconclusive",
    "detectable_loss",
    "ratio_inconclusive",
    "resolve",
]

FLIPS = {"2% flips": 0.02, "5% flips": 0.05, "10% flips": 0.10}

# Standard deviation over samples of the loss per token, nats.
SPREADS = {
    "log_perplexity": {"8 bits": 0.0057, "4 bits, groups of 32": 0.083, "4 bits per channel": 0.127},
    "gold_nll": {"8 bits": 0.0093, "4 bits, groups of 32": 0.101},
}


@dataclass(frozen=True)
class Resolution:
    """One assumed spread of a metric: the chance that a lossless variant stays INCONCLUSIVE, and the loss it can show.

    `detectable` is in the unit of the loss: the smallest margin a lossless variant passes with probability POWER.
    """

    assumption: str
    inconclusive: float
    detectable: float


def resolve(metric: Metric, n: int, *, alpha: float) -> tuple[int, tuple[Resolution, ...]]:
    """Fewest samples that may decide, and what `n` samples resolve at the level of the last look, per assumed spread.

    Kinds without tabulated spreads (bits per byte, KL) have no rows.
    """
    level, binary = spend(alpha, metric.plan(n))[-1], metric.kind == "accuracy"
    spreads = {name: math.sqrt(flips) for name, flips in FLIPS.items()} if binary else SPREADS.get(metric.kind, {})
    undecided = accuracy_inconclusive if binary else ratio_inconclusive
    return fewest(metric, alpha=level, binary=binary), tuple(
        Resolution(
            assumption=name,
            inconclusive=undecided(n, sd=sd, margin=metric.limit, alpha=level),
            detectable=detectable_loss(n, sd=sd, alpha=level),
        )
        for name, sd in spreads.items()
    )


def accuracy_inconclusive(n: int, *, sd: float, margin: float, alpha: float) -> float:
    """Exact chance that Tango's bounds decide nothing when sd^2 of n answers flip, for better as often as worse."""
    flips = sd**2
    centre, reach = n * flips / 2, 9 * math.sqrt(n * flips / 2) + 9
    counts = np.arange(max(0, math.floor(centre - reach)), min(n, math.ceil(centre + reach)) + 1)
    lost, gained = (grid.ravel() for grid in np.meshgrid(counts, counts))
    possible = lost + gained <= n
    lost, gained = lost[possible], gained[possible]
    kept = n - lost - gained
    orders = gammaln(n + 1) - gammaln(lost + 1) - gammaln(gained + 1) - gammaln(kept + 1)
    chance = np.exp(orders + xlogy(lost + gained, flips / 2) + xlogy(kept, 1 - flips))
    decided = np.abs(tango_score(lost, gained, n, margin)) > -ndtri(alpha)
    return max(0.0, float(1 - chance[decided].sum()))  # rounding may go below zero


def ratio_inconclusive(n: int, *, sd: float, margin: float, alpha: float) -> float:
    """Chance that n samples of equal weight decide nothing about a lossless variant whose loss has this spread."""
    reach, z = margin * math.sqrt(n) / sd, float(-ndtri(alpha))
    return max(0.0, float(1 - ndtr(reach - z) - ndtr(-reach - z)))


def detectable_loss(n: int, *, sd: float, alpha: float) -> float:
    """Smallest margin that n samples of a lossless variant pass with probability POWER, normal approximation."""
    return float(-ndtri(alpha) + ndtri(POWER)) * sd / math.sqrt(n)
