"""Stored rows as samples that can be shown: what each side scored, how much worse the variant is, and what it said.

Rows that cannot be compared (refused evidence holds such) are left out here and counted by nobody: the verdict is made
in `evals.gate`, and this is for looking only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evals.pairing import Row

__all__ = ["View", "views", "worst"]

Sides = tuple[Sequence[Row], Sequence[Row]]


@dataclass(frozen=True)
class View:
    """One sample on both sides; worse is a positive `loss`.

    source, variant   nats per token, or the score of an answer
    loss              their difference
    agreement         share of tokens whose most likely next token is the source's; None if not measured
    said              what source and variant answered; "" where nothing was generated
    """

    id: str
    tokens: int | None
    source: float
    variant: float
    loss: float
    agreement: float | None
    said: tuple[str, str]


def views(sides: Sides) -> list[View]:
    """The samples both sides hold, in the variant's order."""
    baseline = {row["id"]: row for row in sides[0]}
    found = (_view(baseline[row["id"]], row) for row in sides[1] if row["id"] in baseline)
    return [view for view in found if view is not None]


def worst(found: Sequence[View], count: int) -> list[int]:
    """Places of the samples that lost most, at most `count`, only those that lost at all."""
    order = sorted(range(len(found)), key=lambda place: -found[place].loss)
    return [place for place in order[:count] if found[place].loss > 0]


def _view(ours: Row, theirs: Row) -> View | None:
    answers = "score" in theirs
    source, variant = (_number(row, answers) for row in (ours, theirs))
    if source is None or variant is None:
        return None
    tokens = theirs.get("tokens")
    return View(
        id=str(theirs["id"]),
        tokens=tokens if isinstance(tokens, int) else None,
        source=source,
        variant=variant,
        loss=source - variant if answers else variant - source,
        agreement=_share(theirs),
        said=(_text(ours), _text(theirs)),
    )


def _number(row: Row, answers: bool) -> float | None:
    """The score, or the loss per token; None if it is no finite number."""
    value, weight = (row.get("score"), 1) if answers else (row.get("nll"), row.get("tokens"))
    if not isinstance(value, int | float) or not isinstance(weight, int | float) or not weight > 0:
        return None
    return value / weight if math.isfinite(value) else None


def _share(row: Mapping[str, Any]) -> float | None:
    agree, tokens = row.get("agree"), row.get("tokens")
    return agree / tokens if isinstance(agree, int) and isinstance(tokens, int) and tokens > 0 else None


def _text(row: Row) -> str:
    text = row.get("text")
    return text if isinstance(text, str) else ""
