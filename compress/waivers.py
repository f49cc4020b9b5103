"""Waivers: a person answers for a loss that was not shown to be below its margin. The verdict is WAIVED, never PASS.

A waiver names one metric and the very bytes (their manifest's digest), so that it cannot outlive them, and ends on a
day. Evidence that was refused, and metrics that were not measured, cannot be waived: there is nothing to answer for.
WAIVED ends a command as the verdict below it would, unless whoever runs it accepts waivers there and then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

from evals.gate import Metric, MetricResult, Outcome

__all__ = ["WAIVED", "Waiver", "exit_code", "expired", "read_waivers", "waive"]

WAIVED = "WAIVED"
WAIVABLE = ("FAIL", "INCONCLUSIVE")


@dataclass(frozen=True)
class Waiver:
    """`by` answers for the loss of `metric` on the bytes of `checkpoint_sha256` up to and including the day `until`."""

    metric: str
    checkpoint_sha256: str
    reason: str
    by: str
    until: str

    def covers(self, checkpoint: str, today: date) -> bool:
        """Whether it is about these bytes and has not ended."""
        return self.checkpoint_sha256 == checkpoint and date.fromisoformat(self.until) >= today

    def record(self) -> dict[str, str]:
        """Plain data for gate.json."""
        return asdict(self)


def read_waivers(recipe: Mapping[str, Any]) -> tuple[Waiver, ...]:
    """The waivers of a resolved recipe, which checked them. Raises KeyError, TypeError for anything else."""
    return tuple(Waiver(**fields) for fields in recipe.get("gate", {}).get("waivers", ()))


def waive(
    outcome: Outcome,
    results: Sequence[MetricResult],
    waivers: Iterable[Waiver],
    *,
    metrics: Sequence[Metric],
    checkpoint: str,
    today: date,
) -> tuple[Outcome, tuple[Waiver, ...]]:
    """The outcome with its waivers: WAIVED if every metric that blocks has one, else as it was and none."""
    measured = {result.metric for result in results}
    whole = all(metric.id in measured for metric in metrics if metric.required)
    blocking = [result.metric for result in results if result.required and result.verdict in WAIVABLE]
    valid = {waiver.metric: waiver for waiver in waivers if waiver.covers(checkpoint, today)}
    if outcome.verdict not in WAIVABLE or not whole or not set(blocking) <= valid.keys():
        return outcome, ()
    return replace(outcome, verdict=WAIVED), tuple(valid[name] for name in blocking)


def expired(gate: Mapping[str, Any], today: date) -> list[str]:
    """Metrics of gate.json whose waiver has ended."""
    return [waiver["metric"] for waiver in gate.get("waivers", ()) if date.fromisoformat(waiver["until"]) < today]


def exit_code(gate: Mapping[str, Any], *, accept_waivers: bool) -> int:
    """How a command ends: as gate.json says, but 0 for waivers that are accepted and have not ended."""
    accepted = gate["verdict"] == WAIVED and accept_waivers and not expired(gate, date.today())
    return 0 if accepted else int(gate["exit_code"])
