"""One look at one metric: guards first, then the bounds at the level of the look, then the margin."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.amounts import format_loss, format_score, perplexity
from compress.errors import Refused
from evals.metric import Metric, MetricResult, refused
from evals.pairing import KINDS, Pairs, Row
from evals.statistics import (
    Bounds,
    accuracy_bounds,
    accuracy_floor,
    min_pairs,
    needed_clusters,
    needed_pairs,
    ratio_bounds,
)

__all__ = ["MIN_CLUSTERS", "fewest", "judge"]

MIN_CLUSTERS = 20  # below it the t bound over clusters of unequal size loses its level
SIGNAL_PER_MARGIN = 3  # margins a baseline must have to lose before losing none of them says anything


@dataclass(frozen=True)
class _Estimate:
    """Bounds of the loss, the samples that would decide, and the counts behind both."""

    bounds: Bounds
    needed: int | None
    extra: dict[str, Any]


def judge(metric: Metric, pairs: Pairs, *, alpha: float, aa_difference: float) -> MetricResult:
    """Verdict on all of `pairs` with both bounds one-sided at `alpha`, widened by `aa_difference`."""
    n = len(pairs.rows)
    try:
        caps = _caps(metric, pairs)
        _enough(metric, pairs, alpha)
    except Refused as refusal:
        return refused(metric, n, str(refusal))
    found = (_accuracy if _binary(metric, pairs) else _ratio)(metric, pairs, alpha)
    lower, upper = found.bounds.lower - aa_difference, found.bounds.upper + aa_difference
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return refused(metric, n, f"the bounds {lower:g} and {upper:g} are not finite")
    verdict = "PASS" if upper < metric.limit else "FAIL" if lower > metric.limit else "INCONCLUSIVE"
    total = pairs.weight.sum()
    result = replace(
        refused(metric, n, ""),
        verdict=verdict,
        baseline=None if KINDS[metric.kind].between else float(pairs.baseline.sum() / total),
        variant=float(pairs.variant.sum() / total),
        loss=found.bounds.estimate,
        lower=lower,
        upper=upper,
        needed_n=found.needed if verdict == "INCONCLUSIVE" else None,
        extra={**found.extra, **caps, **_agreement(pairs), "alpha_look": alpha},
    )
    result = replace(result, extra={**result.extra, **_perplexities(result)})
    return replace(result, reason=_reason(result))


def fewest(metric: Metric, *, alpha: float, binary: bool) -> int:
    """Fewest samples that may decide at this level; `binary` for answers that are right or wrong.

    Graded answers need as many as right or wrong ones: with no answer changed the t bound has no width at all.
    """
    pairs = min_pairs(metric.limit, alpha=alpha) if metric.kind == "accuracy" else 0
    return max(metric.min_units, pairs, 0 if binary else MIN_CLUSTERS)


def _binary(metric: Metric, pairs: Pairs) -> bool:
    """Whether answers are right or wrong, so that Tango's bound applies; graded scores take the paired t bound."""
    return metric.kind == "accuracy" and bool(np.isin([pairs.baseline, pairs.variant], (0.0, 1.0)).all())


def _accuracy(metric: Metric, pairs: Pairs, alpha: float) -> _Estimate:
    n = len(pairs.rows)
    lost, gained = int((pairs.baseline > pairs.variant).sum()), int((pairs.baseline < pairs.variant).sum())
    bounds = accuracy_bounds(lost, gained, n, alpha=alpha)
    needed = needed_pairs(lost, gained, n, margin=metric.limit, alpha=alpha)
    return _Estimate(bounds, needed, {"b": lost, "c": gained, "flips": (lost + gained) / n})


def _ratio(metric: Metric, pairs: Pairs, alpha: float) -> _Estimate:
    delta = KINDS[metric.kind].sign * (pairs.variant - pairs.baseline)
    bounds, k = ratio_bounds(delta, pairs.weight, alpha=alpha), len(pairs.rows)
    needed = needed_clusters(bounds, k, margin=metric.limit, alpha=alpha)
    return _Estimate(bounds, needed, {"clusters": k, "se": bounds.se, "weight": float(pairs.weight.sum())})


def _enough(metric: Metric, pairs: Pairs, alpha: float) -> None:
    """Refuse too few samples for the statistics or the recipe, and a baseline with too little to lose."""
    n, binary = len(pairs.rows), _binary(metric, pairs)
    floor = fewest(metric, alpha=alpha, binary=binary)
    if n < floor:
        raise Refused(f"{n} samples are too few, at least {floor} are needed for this margin; evaluate more")
    if metric.kind != "accuracy":
        return
    if binary:
        least = accuracy_floor(int(pairs.baseline.sum()), n, alpha=alpha)
    else:
        least = ratio_bounds(pairs.baseline, pairs.weight, alpha=alpha).lower
    chance = metric.chance or 0.0
    wanted = max(metric.min_signal or 0.0, SIGNAL_PER_MARGIN * metric.limit)
    if not least - chance >= wanted:
        texts = [format_score("accuracy", value) for value in (least, chance, wanted)]
        raise Refused(
            "NO_SIGNAL: the baseline's accuracy is only shown to be above {}, with chance at {} and {} above it "
            "needed to see a loss; use an easier task".format(*texts)
        )


def _caps(metric: Metric, pairs: Pairs) -> dict[str, float]:
    """Share of each side's generations that hit the length cap, refused above the limit; empty if none generated."""
    rates = {}
    for side, rows in zip(("baseline", "variant"), zip(*pairs.rows, strict=True), strict=True):
        capped = [bool(row["gen_capped"]) for row in rows if row.get("gen_capped") is not None]
        if capped:
            rates[f"cap_hit_{side}"] = sum(capped) / len(capped)
            if not rates[f"cap_hit_{side}"] <= metric.cap_hit_max:
                raise Refused(
                    f"{sum(capped)} of {len(capped)} generations of the {side} hit the length cap, more than "
                    f"{metric.cap_hit_max:.0%}; raise the cap"
                )
    return rates


def _agreement(pairs: Pairs) -> dict[str, float]:
    """Shares of tokens whose most likely successor is right (each side), or the source's (variant), where counted."""
    baseline, variant = zip(*pairs.rows, strict=True)
    columns = {"top1_baseline": (baseline, "top1"), "top1_variant": (variant, "top1"), "agreement": (variant, "agree")}
    return {name: _share(rows, field) for name, (rows, field) in columns.items() if _counted(rows, field)}


def _counted(rows: Iterable[Row], field: str) -> bool:
    return all(row.get(field) is not None and row.get("tokens") for row in rows)


def _share(rows: Iterable[Row], field: str) -> float:
    counts = [(row[field], row["tokens"]) for row in rows]
    return float(sum(count for count, _ in counts) / sum(tokens for _, tokens in counts))


def _perplexities(result: MetricResult) -> dict[str, float | None]:
    """Perplexities of both sides and the relative increase with its bounds, beside the logarithms that are compared."""
    if result.kind != "log_perplexity":
        return {}
    increase = {
        name: None if (grown := perplexity(value)) is None else grown - 1
        for name, value in (
            ("increase", result.loss),
            ("increase_lower", result.lower),
            ("increase_upper", result.upper),
            ("increase_margin", result.margin),
        )
    }
    sides = {"perplexity_baseline": result.baseline, "perplexity_variant": result.variant}
    return {name: perplexity(value) for name, value in sides.items()} | increase


def _reason(result: MetricResult) -> str:
    """One sentence with the bound that decided, or the samples that would."""
    lower, upper, margin = (format_loss(result.kind, value) for value in (result.lower, result.upper, result.margin))
    if result.verdict == "PASS":
        return f"the loss is at most {upper}, below the margin of {margin}"
    if result.verdict == "FAIL":
        return f"the loss is at least {lower}, above the margin of {margin}"
    if result.needed_n is None:
        advice = "no number of samples decides a loss that equals the margin"
    else:
        advice = f"about {result.needed_n} samples would decide if it stays at {format_loss(result.kind, result.loss)}"
    return f"the loss is between {lower} and {upper} around the margin of {margin}; {advice}"
