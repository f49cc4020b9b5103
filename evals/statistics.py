"""One-sided confidence bounds of a paired loss, worse always positive, from plain counts and arrays.

Paired, because both sides answer the same samples: the samples' own difficulty, by far the largest part of the
variance, cancels. One-sided, because the question is whether the loss is below a margin, not whether it differs from
zero. Two estimators cover every metric of the gate:

    accuracy   Tango's score bound for the difference of two paired proportions; it keeps its level with few or no
               discordant pairs, where the Wald interval shrinks to a point and passes anything
    ratio      sum(delta) / sum(weight) with documents as clusters, since the tokens of one document are not
               independent; linearised variance and Student's t

Left out on purpose: the bootstrap (the t bound covers as well from 20 clusters on), betting e-processes (valid at any
time, but 20 to 40 points less power where samples are dear), and corrections for several metrics (all must pass, an
intersection-union test, so each may use the whole alpha).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri, stdtrit

__all__ = [
    "POWER",
    "Bounds",
    "accuracy_bounds",
    "accuracy_floor",
    "min_pairs",
    "needed_clusters",
    "needed_pairs",
    "ratio_bounds",
    "spend",
    "tango_score",
]

POWER = 0.8  # chance of a decision that `needed_pairs` and `needed_clusters` plan for


@dataclass(frozen=True)
class Bounds:
    """An estimate with two one-sided bounds, each exceeded with probability alpha; `se` where one is defined."""

    estimate: float
    lower: float
    upper: float
    se: float | None = None


def tango_score(lost: ArrayLike, gained: ArrayLike, n: int, difference: float) -> NDArray[np.float64]:
    """Score statistic of H0: P(lost) - P(gained) = difference, approximately standard normal under H0.

    `lost` counts the pairs that only the baseline answers right, `gained` those that only the variant does, of `n`
    pairs; both may be arrays of one shape. Under H0, q = P(gained) maximises the likelihood where
    2n q^2 - B q - gained d (1 - d) = 0 with B = lost + gained - d (2n + gained - lost). Tango, Statistics in
    Medicine 17 (1998), 891-908.
    """
    b, c, d = np.asarray(lost, float), np.asarray(gained, float), difference
    linear = b + c - d * (2 * n + c - b)
    root = np.sqrt(np.maximum(linear**2 + 8 * n * c * d * (1 - d), 0.0))
    # Of the two forms of the larger root, take the one without cancellation.
    conjugate = np.where(root > linear, root - linear, 1.0)
    q = np.where(linear > 0, (linear + root) / (4 * n), 2 * c * d * (1 - d) / conjugate)
    variance = n * (2 * q + d * (1 - d))
    return np.asarray((b - c - n * d) / np.sqrt(np.maximum(variance, 1e-300)))


def accuracy_bounds(lost: int, gained: int, n: int, *, alpha: float) -> Bounds:
    """Tango's bounds of the accuracy lost, in [-1, 1], from the discordant pairs among `n` pairs."""
    if n < 1 or lost < 0 or gained < 0 or lost + gained > n:
        raise ValueError(f"{lost} lost and {gained} gained are no counts of {n} pairs")
    from scipy.optimize import brentq  # takes longer to import than everything else here

    z, estimate, edge = -ndtri(alpha), (lost - gained) / n, 1e-12

    def crossing(target: float, low: float, high: float) -> float:
        return float(brentq(lambda d: float(tango_score(lost, gained, n, d)) - target, low, high, xtol=1e-13))

    lower = -1.0 if gained == n else crossing(z, -1 + edge, estimate - edge)
    upper = 1.0 if lost == n else crossing(-z, estimate + edge, 1 - edge)
    return Bounds(estimate, lower, upper)


def ratio_bounds(delta: ArrayLike, weight: ArrayLike, *, alpha: float) -> Bounds:
    """Bounds of sum(delta) / sum(weight) over k clusters: linearised variance, Student's t with k - 1 degrees.

    `delta` (k,) is each cluster's summed loss, variant minus baseline, `weight` (k,) its tokens, bytes or samples.
    Cochran, Sampling Techniques (1977), section 6.3.
    """
    change, size = np.asarray(delta, float), np.asarray(weight, float)
    k, total = len(change), float(size.sum())
    if k < 2 or not total > 0:
        raise ValueError(f"a variance needs two clusters with a weight, got {k} with {total:g} in all")
    ratio = float(change.sum()) / total
    residual = change - ratio * size
    se = math.sqrt(k / (k - 1) * float(residual @ residual)) / total
    reach = float(-stdtrit(k - 1, alpha)) * se
    return Bounds(ratio, ratio - reach, ratio + reach, se)


def accuracy_floor(right: int, n: int, *, alpha: float) -> float:
    """Exact (Clopper-Pearson) one-sided lower bound of an accuracy of which `right` of `n` answers are right."""
    return float(betaincinv(right, n - right + 1, alpha)) if right else 0.0


def spend(alpha: float, looks: Sequence[int]) -> tuple[float, ...]:
    """Level of each pre-declared look, in proportion to the samples it adds; sums to alpha (union bound)."""
    if not looks or looks[0] < 1 or any(late <= early for early, late in pairwise(looks)):
        raise ValueError(f"looks must be rising sample counts, got {list(looks)}")
    return tuple(alpha * step / looks[-1] for step in np.diff([0, *looks]).tolist())


def min_pairs(margin: float, *, alpha: float) -> int:
    """Fewest pairs with which even no lost pair at all shows a loss below `margin`: (1 - margin)^n <= alpha."""
    return math.ceil(math.log(alpha) / math.log1p(-margin))


def needed_pairs(lost: int, gained: int, n: int, *, margin: float, alpha: float) -> int | None:
    """Pairs that decide with probability POWER if flips and loss stay as observed; None if loss equals margin."""
    loss, flips = (lost - gained) / n, (lost + gained) / n
    wanted = _needed(flips - loss**2, margin - loss, alpha)
    return None if wanted is None else max(wanted, min_pairs(margin, alpha=alpha))


def needed_clusters(bounds: Bounds, clusters: int, *, margin: float, alpha: float) -> int | None:
    """Clusters that decide with probability POWER if spread and loss stay as observed; None if loss equals margin."""
    if bounds.se is None:
        raise ValueError("bounds without a standard error do not tell how many clusters are needed")
    return _needed(clusters * bounds.se**2, margin - bounds.estimate, alpha)


def _needed(variance: float, distance: float, alpha: float) -> int | None:
    """The n at which (z_alpha + z_power) sqrt(variance / n) = |distance|; `variance` is that of one sample."""
    if distance == 0:
        return None
    reach = float(-ndtri(alpha) + ndtri(POWER)) / distance
    wanted = variance * reach * reach
    return max(1, math.ceil(wanted)) if math.isfinite(wanted) else None
