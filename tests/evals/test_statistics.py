"""Bounds against brute force, exact false-pass rates, and a seeded simulation of their level."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import multinomial, norm
from scipy.stats import t as student

from evals.statistics import (
    accuracy_bounds,
    accuracy_floor,
    min_pairs,
    needed_clusters,
    needed_pairs,
    ratio_bounds,
    spend,
    tango_score,
)

COUNTS = [(40, 20, 160), (3, 0, 100), (0, 0, 268), (12, 30, 500), (7, 7, 1319), (0, 5, 60), (30, 1, 64)]


def brute_force_score(lost, gained, n, difference):
    """Score with q = P(gained) found by maximising the constrained likelihood numerically."""

    def cost(q):
        cells = [(lost, q + difference), (gained, q), (n - lost - gained, 1 - 2 * q - difference)]
        return -sum(count * math.log(p) for count, p in cells if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    q = minimize_scalar(cost, bounds=(low + 1e-12, high - 1e-12), method="bounded", options={"xatol": 1e-12}).x
    variance = n * (2 * q + difference * (1 - difference))
    return (lost - gained - n * difference) / math.sqrt(variance)


@pytest.mark.parametrize("difference", [-0.3, -0.02, 0.01, 0.05, 0.4])
@pytest.mark.parametrize(("lost", "gained", "n"), COUNTS)
def test_tango_score_is_that_of_the_constrained_maximum_likelihood(lost, gained, n, difference):
    expected = brute_force_score(lost, gained, n, difference)
    assert float(tango_score(lost, gained, n, difference)) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(("lost", "gained", "n"), COUNTS)
def test_accuracy_bounds_are_where_the_score_reaches_the_normal_quantile(lost, gained, n):
    bounds = accuracy_bounds(lost, gained, n, alpha=0.05)
    z = norm.isf(0.05)
    assert brute_force_score(lost, gained, n, bounds.upper) == pytest.approx(-z, abs=5e-3)
    assert brute_force_score(lost, gained, n, bounds.lower) == pytest.approx(z, abs=5e-3)
    assert bounds.lower < bounds.estimate == (lost - gained) / n < bounds.upper


def test_accuracy_bounds_mirror_when_the_sides_change_places():
    forward, backward = accuracy_bounds(9, 4, 200, alpha=0.05), accuracy_bounds(4, 9, 200, alpha=0.05)
    assert (forward.lower, forward.upper) == pytest.approx((-backward.upper, -backward.lower), abs=1e-9)


def test_no_flips_still_leave_an_upper_bound():
    z = norm.isf(0.05)
    assert accuracy_bounds(0, 0, 100, alpha=0.05).upper == pytest.approx(z**2 / (100 + z**2))


def test_all_pairs_flipped():
    assert accuracy_bounds(10, 0, 10, alpha=0.05).upper == 1.0
    assert accuracy_bounds(0, 10, 10, alpha=0.05).lower == -1.0


@pytest.mark.parametrize(("lost", "gained", "n"), [(0, 0, 0), (-1, 0, 5), (3, 3, 5)])
def test_counts_that_cannot_be_are_refused(lost, gained, n):
    with pytest.raises(ValueError, match=f"^{lost} lost and {gained} gained are no counts of {n} pairs$"):
        accuracy_bounds(lost, gained, n, alpha=0.05)


def false_pass_rate(n, margin, flips, alpha):
    """Exact chance of PASS when the true loss equals the margin: the sum over all counts the bound lets through."""
    lost_p, gained_p = (flips + margin) / 2, (flips - margin) / 2
    lost, gained = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    legal = lost + gained <= n
    lost, gained = lost[legal], gained[legal]
    chance = multinomial.pmf(np.stack([lost, gained, n - lost - gained], -1), n, [lost_p, gained_p, 1 - flips])
    return float(chance[tango_score(lost, gained, n, margin) < -norm.isf(alpha)].sum())


@pytest.mark.parametrize(
    ("n", "margin", "flips", "published"),
    [(100, 0.02, 0.05, 0.046), (300, 0.01, 0.01, 0.049), (300, 0.02, 0.02, 0.061), (400, 0.02, 0.1, 0.050)],
)
def test_false_pass_rate_of_tango_is_near_its_level(n, margin, flips, published):
    assert false_pass_rate(n, margin, flips, 0.05) == pytest.approx(published, abs=0.004)


def test_ratio_bounds_spelt_out():
    delta, weight = [1.0, -0.5, 2.0, 0.25], [10, 20, 30, 40]
    ratio = sum(delta) / 100
    squares = sum((d - ratio * w) ** 2 for d, w in zip(delta, weight, strict=True))
    se = math.sqrt(4 / 3 * squares) / 100
    bounds = ratio_bounds(delta, weight, alpha=0.05)
    assert bounds.estimate == pytest.approx(ratio) and bounds.se == pytest.approx(se)
    assert bounds.upper == pytest.approx(ratio + student.isf(0.05, 3) * se)
    assert bounds.lower == pytest.approx(ratio - student.isf(0.05, 3) * se)


def test_ratio_bounds_of_equal_weights_are_those_of_the_paired_t_test():
    delta = np.random.default_rng(1).normal(size=30)
    bounds = ratio_bounds(delta, np.ones(30), alpha=0.05)
    reach = student.isf(0.05, 29) * delta.std(ddof=1) / math.sqrt(30)
    assert (bounds.lower, bounds.upper) == pytest.approx((delta.mean() - reach, delta.mean() + reach))


@pytest.mark.parametrize(("delta", "weight"), [([1.0], [2.0]), ([1.0, 2.0], [0.0, 0.0])], ids=["one", "empty"])
def test_ratio_without_a_variance_is_refused(delta, weight):
    with pytest.raises(ValueError, match="a variance needs two clusters with a weight"):
        ratio_bounds(delta, weight, alpha=0.05)


def test_clustered_bound_keeps_its_level_and_a_token_bound_does_not():
    """Documents share an effect, so the tokens within one are not independent; the true loss equals the margin."""
    rng, runs, margin = np.random.default_rng(7), 4000, 0.02
    clustered = naive = 0
    for _ in range(runs):
        tokens = rng.integers(50, 400, size=40)
        delta = tokens * rng.normal(margin, 0.05, size=40) + np.sqrt(tokens) * rng.normal(0, 0.1, size=40)
        bounds = ratio_bounds(delta, tokens, alpha=0.05)
        clustered += bounds.upper < margin
        naive += bounds.estimate + norm.isf(0.05) * 0.1 / math.sqrt(tokens.sum()) < margin
    # Three standard errors of a rate of 5% over the runs, plus what the linearised variance costs.
    assert 0.03 < clustered / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs) + 0.01
    assert naive / runs > 0.3


def test_accuracy_floor_is_exact():
    floor = accuracy_floor(30, 100, alpha=0.05)
    above = sum(math.comb(100, k) * floor**k * (1 - floor) ** (100 - k) for k in range(30, 101))
    assert above == pytest.approx(0.05)
    assert accuracy_floor(0, 100, alpha=0.05) == 0.0


def test_alpha_is_spent_in_proportion_to_new_samples():
    assert spend(0.05, [132, 264, 528, 1320]) == pytest.approx((0.005, 0.005, 0.01, 0.03))
    assert spend(0.05, [60]) == (0.05,)


@pytest.mark.parametrize("looks", [[], [0, 5], [5, 5], [9, 3]], ids=str)
def test_looks_must_rise(looks):
    with pytest.raises(ValueError, match="looks must be rising sample counts"):
        spend(0.05, looks)


def test_fewest_pairs():
    assert [min_pairs(m, alpha=0.05) for m in (0.005, 0.01, 0.02, 0.03, 0.05)] == [598, 299, 149, 99, 59]


def test_needed_pairs_of_a_lossless_variant():
    """(z_alpha + z_power)^2 flips / margin^2, and never below the fewest pairs that can decide."""
    assert needed_pairs(10, 10, 400, margin=0.02, alpha=0.05) == 773
    assert needed_pairs(0, 0, 400, margin=0.02, alpha=0.05) == 149
    assert needed_pairs(8, 0, 400, margin=0.02, alpha=0.05) is None


def test_needed_clusters_wants_a_standard_error():
    with pytest.raises(ValueError, match="bounds without a standard error"):
        needed_clusters(accuracy_bounds(1, 2, 60, alpha=0.05), 60, margin=0.01, alpha=0.05)


def test_needed_clusters_would_decide():
    rng = np.random.default_rng(3)
    delta = rng.normal(0.0, 0.083, size=61)
    bounds = ratio_bounds(delta - delta.mean(), np.ones(61), alpha=0.05)
    needed = needed_clusters(bounds, 61, margin=0.01, alpha=0.05)
    expected = (2.4865 * delta.std(ddof=1) / 0.01) ** 2
    assert needed == pytest.approx(expected, rel=0.01)
    assert needed_clusters(bounds, 61, margin=bounds.estimate, alpha=0.05) is None
