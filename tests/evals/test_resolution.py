"""Power before the run: against the published table of detectable losses, and against simulation."""

import math

import numpy as np
import pytest

from evals.gate import Metric, decide
from evals.resolution import FLIPS, accuracy_inconclusive, detectable_loss, ratio_inconclusive, resolve
from evals.statistics import accuracy_bounds


@pytest.mark.parametrize(
    ("n", "flips", "points"),
    [(100, 0.02, 3.5), (400, 0.05, 2.8), (1319, 0.10, 2.17), (5000, 0.20, 1.57)],
)
def test_detectable_accuracy(n, flips, points):
    assert 100 * detectable_loss(n, sd=flips**0.5, alpha=0.05) == pytest.approx(points, abs=0.05)


@pytest.mark.parametrize(("sd", "percent"), [(0.0057, 0.18), (0.083, 2.6), (0.127, 4.0)])
def test_detectable_perplexity_of_62_documents(sd, percent):
    assert 100 * detectable_loss(62, sd=sd, alpha=0.05) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize("flips", FLIPS.values(), ids=FLIPS)
def test_chance_of_no_decision_is_that_of_simulated_answers(flips):
    rng, n, margin, runs = np.random.default_rng(5), 300, 0.02, 800
    undecided = 0
    for lost, gained, _ in rng.multinomial(n, [flips / 2, flips / 2, 1 - flips], size=runs).tolist():
        bounds = accuracy_bounds(lost, gained, n, alpha=0.05)
        undecided += not (bounds.upper < margin or bounds.lower > margin)
    expected = accuracy_inconclusive(n, sd=flips**0.5, margin=margin, alpha=0.05)
    assert undecided / runs == pytest.approx(expected, abs=0.05)


def test_no_flips_are_decided_or_not_without_chance():
    assert accuracy_inconclusive(300, sd=3e-5, margin=0.02, alpha=0.05) == pytest.approx(0, abs=1e-6)
    assert accuracy_inconclusive(50, sd=3e-5, margin=0.02, alpha=0.05) == pytest.approx(1, abs=1e-6)


def test_chance_of_no_decision_about_a_likelihood_is_that_of_the_gate():
    rng, runs, metric = np.random.default_rng(9), 300, Metric(id="m", kind="gold_nll", data="d", margin=0.02)
    base = [{"id": i, "hash": "h", "tokens": 1, "nll": 5.0} for i in range(60)]
    undecided = 0
    for _ in range(runs):
        variant = [{**row, "nll": 5 + 0.08 * z} for row, z in zip(base, rng.normal(size=60), strict=True)]
        undecided += decide(metric, base, variant, alpha=0.05).verdict == "INCONCLUSIVE"
    assert undecided / runs == pytest.approx(ratio_inconclusive(60, sd=0.08, margin=0.02, alpha=0.05), abs=0.08)


def test_resolve_uses_the_level_of_the_last_look():
    metric = Metric(id="t", kind="accuracy", data="d", margin=0.02, looks=(264, 528, 1320))
    floor, rows = resolve(metric, 1320, alpha=0.05)
    assert floor == 174 and [row.assumption for row in rows] == list(FLIPS)
    assert rows[1].inconclusive == accuracy_inconclusive(1320, sd=0.05**0.5, margin=0.02, alpha=0.05 * 0.6)
    assert rows[0].inconclusive < rows[1].inconclusive < rows[2].inconclusive


def test_resolve_of_kinds_without_known_spread_has_no_rows():
    assert resolve(Metric(id="k", kind="kl", data="d", margin=0.2), 60, alpha=0.05) == (20, ())


def test_a_chance_that_is_nothing_is_not_below_zero():
    assert ratio_inconclusive(24, sd=0.01, margin=1.0, alpha=0.05) == 0
    assert math.copysign(1, accuracy_inconclusive(2000, sd=0.1, margin=0.5, alpha=0.05)) == 1
