"""The gate: rows of both sides in, a verdict with its reason out. Pure, so stored rows give the same verdict again.

    PASS          the upper bound of the loss is below the margin
    FAIL          the lower bound of the loss is above the margin
    INCONCLUSIVE  neither, at the last look
    REFUSED       the rows are no evidence: not finite, not comparable, too few, or a baseline that cannot show a loss

Every comparison is written so that NaN refuses. Each required metric is tested at the whole alpha, since all of them
must pass; within one metric the looks share it. Judging what rows cannot show (tokenizers, engines, manifests) is
left to those who make the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compress.errors import Refused
from evals.look import judge
from evals.metric import Metric, MetricResult, refused
from evals.pairing import Row, pair
from evals.statistics import spend

__all__ = ["EXIT_CODES", "Metric", "MetricResult", "Outcome", "decide", "next_look", "overall"]

# Worst first: evidence that is not valid blocks before a shown loss, a shown loss before an open question.
EXIT_CODES = {"REFUSED": 5, "FAIL": 3, "INCONCLUSIVE": 4, "PASS": 0}


@dataclass(frozen=True)
class Outcome:
    """The verdict over all metrics, its exit code, why, and what metrics that are not required have to say."""

    verdict: str
    exit_code: int
    reason: str
    warnings: tuple[str, ...] = ()


def decide(
    metric: Metric,
    baseline_rows: Sequence[Row],
    variant_rows: Sequence[Row],
    *,
    alpha: float,
    aa_difference: float | None = None,
) -> MetricResult:
    """Judge one metric at the first look that decides, else at the last.

    `aa_difference` is by how much two runs of the baseline differ, in the unit of the loss; it widens both bounds. None
    says that there was one run only, which the result does not pass off as no difference.
    Fewer rows than the last look are evidence only if an earlier look has decided; the baseline, which is measured
    once for many variants, may hold more of them than a variant that stopped early.
    """
    try:
        found = _looks(metric, baseline_rows, variant_rows, alpha=alpha, aa_difference=aa_difference)
        result = _conclusion(metric, found, len(variant_rows))
    except Refused as refusal:
        result = refused(metric, len(variant_rows), str(refusal))
    measured = {} if aa_difference is None else {"aa_difference": abs(aa_difference)}
    return replace(result, extra={**result.extra, **measured})


def _conclusion(metric: Metric, found: Sequence[MetricResult], n: int) -> MetricResult:
    """The look that decided, or the last one if its samples are all there."""
    declared = metric.plan(n)[-1]
    if n < declared and not (found and found[-1].decides):
        raise Refused(
            f"{n} of {declared} declared samples were evaluated and no look at them decided; evaluate the rest"
        )
    return found[-1]


def next_look(
    metric: Metric,
    baseline_rows: Sequence[Row],
    variant_rows: Sequence[Row],
    *,
    alpha: float,
    aa_difference: float | None = None,
) -> int | None:
    """Samples wanted in all for the next decision, given those so far (none at first); None once there is none."""
    n = len(variant_rows)
    if n:
        try:
            found = _looks(metric, baseline_rows, variant_rows, alpha=alpha, aa_difference=aa_difference)
        except Refused:
            return None
        if found and found[-1].decides:
            return None
    return next((look for look in metric.plan(n) if look > n), None)


def _looks(
    metric: Metric,
    baseline_rows: Sequence[Row],
    variant_rows: Sequence[Row],
    *,
    alpha: float,
    aa_difference: float | None,
) -> list[MetricResult]:
    """The result of every look the rows reach, up to the first that decides."""
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must be above 0 and below 0.5, got {alpha}")
    if metric.looks:
        baseline_rows = baseline_rows[: len(variant_rows)]
    pairs = pair(metric.kind, baseline_rows, variant_rows)
    n, looks = len(pairs.rows), metric.plan(len(pairs.rows))
    if metric.samples is not None and n > metric.samples:
        raise Refused(f"{n} samples were evaluated where {metric.samples} are declared")
    difference = 0.0 if aa_difference is None else abs(aa_difference)
    if not difference <= metric.limit:
        raise Refused(f"two runs of the baseline differ by {difference:g}, more than the margin {metric.limit:g}")
    found: list[MetricResult] = []
    for look, level in zip(looks, spend(alpha, looks), strict=True):
        if look > n or (found and found[-1].decides):
            break
        result = judge(metric, pairs.first(look), alpha=level, aa_difference=difference)
        found.append(replace(result, look=look, alpha_spent=alpha * look / looks[-1]))
    return found


def overall(
    results: Sequence[MetricResult], *, metrics: Sequence[Metric] = (), refusals: Sequence[str] = ()
) -> Outcome:
    """The worst verdict of the required metrics: REFUSED, then FAIL, then INCONCLUSIVE.

    A required one of `metrics` without a result refuses, unless a metric has failed: a FAIL ends an evaluation early.
    `refusals` are reasons beside the rows why the two sides do not compare; any of them refuses.
    """
    required = [result for result in results if result.required]
    warnings = tuple(
        f"{result.metric}: {result.verdict}, {result.reason}"
        for result in results
        if not result.required and result.verdict != "PASS"
    )
    verdicts = {result.verdict for result in required}
    seen = {result.metric for result in results}
    absent = [metric.id for metric in metrics if metric.required and metric.id not in seen]
    if refusals:
        return Outcome("REFUSED", EXIT_CODES["REFUSED"], "; ".join(refusals), warnings)
    if not required or (absent and not verdicts & {"REFUSED", "FAIL"}):
        reason = f"no result for {', '.join(absent)}" if absent else "no required metric was evaluated"
        return Outcome("REFUSED", EXIT_CODES["REFUSED"], reason, warnings)
    verdict = next(name for name in EXIT_CODES if name in verdicts)
    reason = "; ".join(f"{result.metric}: {result.reason}" for result in required if result.verdict == verdict)
    return Outcome(verdict, EXIT_CODES[verdict], reason, warnings)
