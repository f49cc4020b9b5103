"""What a metric of the gate is, and what is found about it: plain data that a recipe fills and gate.json stores."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from evals.pairing import KINDS
from evals.statistics import spend

__all__ = ["Metric", "MetricResult", "refused"]


@dataclass(frozen=True)
class Metric:
    """What is measured on which samples, and the loss that is allowed.

    margin      log_perplexity: relative increase (0.03 is 3%); gold_nll, kl: nats per token; bits_per_byte: bits;
                accuracy: fraction (0.02 is 2 points)
    looks       rising sample counts at which to decide, rows beyond the last are not used; empty: all rows at once
    samples     declared number of samples, not one more or less; None: as many as there are
    min_units   fewest samples that may decide, beside the floors of the statistics themselves
    chance, min_signal, cap_hit_max   accuracy only: a guesser's accuracy, how far the baseline must be above it, and
                the largest share of generations that may hit the length cap
    """

    id: str
    kind: str
    data: str
    margin: float
    required: bool = True
    looks: tuple[int, ...] = ()
    min_units: int = 0
    chance: float | None = None
    min_signal: float | None = None
    samples: int | None = None
    cap_hit_max: float = 0.05

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} of metric {self.id!r} is none of {', '.join(KINDS)}")
        if not 0 < self.margin < (1 if self.kind == "accuracy" else math.inf):
            raise ValueError(f"margin {self.margin} of metric {self.id!r} must be above 0, below 1 for accuracy")
        if self.looks and self.samples not in (None, self.looks[-1]):
            raise ValueError(f"metric {self.id!r} declares {self.samples} samples and a last look at {self.looks[-1]}")
        if self.looks or self.samples is not None:
            spend(1.0, self.plan(0))

    @property
    def limit(self) -> float:
        """The margin in the unit of the loss: of a perplexity, the logarithm of its allowed growth."""
        return math.log1p(self.margin) if self.kind == "log_perplexity" else self.margin

    def plan(self, rows: int) -> tuple[int, ...]:
        """Sample counts at which a decision may fall, the last one all that are declared, else all `rows` there are."""
        return self.looks or (rows if self.samples is None else self.samples,)


@dataclass(frozen=True)
class MetricResult:
    """What was found; baseline, variant, loss, lower, upper and margin in the unit of the loss, None if not computed.

    `look` is the number of samples the decision fell on, `alpha_spent` the error probability spent until then, and
    `needed_n` the samples that would decide if loss and spread stayed as they are.
    """

    metric: str
    kind: str
    data: str
    required: bool
    margin: float
    n: int
    verdict: str
    reason: str
    baseline: float | None = None
    variant: float | None = None
    loss: float | None = None
    lower: float | None = None
    upper: float | None = None
    look: int | None = None
    alpha_spent: float | None = None
    needed_n: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def decides(self) -> bool:
        """Whether the loss is shown to be below or above the margin."""
        return self.verdict in ("PASS", "FAIL")

    def record(self) -> dict[str, Any]:
        """Plain data for gate.json, the metric's name as `id`."""
        fields = asdict(self)
        return {"id": fields.pop("metric"), **fields}


def refused(metric: Metric, n: int, reason: str) -> MetricResult:
    """The result of rows that are no evidence: a reason and no numbers."""
    return MetricResult(
        metric=metric.id,
        kind=metric.kind,
        data=metric.data,
        required=metric.required,
        margin=metric.limit,
        n=n,
        verdict="REFUSED",
        reason=reason,
    )
