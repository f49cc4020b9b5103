"""Rows of both sides become paired arrays, or the evidence is refused.

A row is one sample's scores as they were stored. Nothing is dropped, filled in or reordered: a row that is missing,
doubled, out of order, about another text or not finite makes the two sides incomparable, and a mean over what is left
would look like any other number. The sentences name the first offender.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.errors import Refused

__all__ = ["KINDS", "Kind", "Pairs", "Row", "pair"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """How a kind of metric reads a row.

    `value` is summed over a sample and `weight` divides it (None: every sample weighs one). `match` are the fields
    that must be equal on both sides; bits per byte may compare two tokenizers, so there the bytes must agree and the
    hash of the token ids cannot. `sign` is +1 where more is worse; `low` and `high` bound a sample's value per weight.
    `between`: the value is a distance between the sides, held by the variant's row, and nothing on the baseline's.
    """

    value: str
    weight: str | None
    match: tuple[str, ...]
    sign: int = 1
    scale: float = 1.0
    low: float = 0.0
    high: float = math.inf
    between: bool = False


KINDS = {
    "log_perplexity": Kind("nll", "tokens", ("hash", "tokens")),
    "gold_nll": Kind("nll", "tokens", ("hash", "tokens")),
    "bits_per_byte": Kind("nll", "bytes", ("bytes",), scale=1 / math.log(2)),
    # A divergence is not negative; float32 sums over a vocabulary come out slightly below zero.
    "kl": Kind("kl", "tokens", ("hash", "tokens"), low=-1e-3, between=True),
    "accuracy": Kind("score", None, ("hash",), sign=-1, high=1.0),
}


@dataclass(frozen=True)
class Pairs:
    """Both sides of n samples in their declared order: values (n,), weights (n,), and the rows they came from."""

    baseline: NDArray[np.float64]
    variant: NDArray[np.float64]
    weight: NDArray[np.float64]
    rows: tuple[tuple[Row, Row], ...]

    def first(self, n: int) -> "Pairs":
        """The first n samples."""
        return Pairs(self.baseline[:n], self.variant[:n], self.weight[:n], self.rows[:n])


def pair(kind: str, baseline: Sequence[Row], variant: Sequence[Row]) -> Pairs:
    """Pair the rows of both sides, values in the gate's unit; `Refused` says why they do not compare."""
    rules = KINDS[kind]
    sides = {"baseline": baseline, "variant": variant}
    _same_samples(baseline, variant)
    for ours, theirs in zip(baseline, variant, strict=True):
        _same_text(rules.match, ours, theirs)
    for side, rows in sides.items():
        _untruncated(side, rows)
    weight = np.ones(len(variant)) if rules.weight is None else _column(rules.weight, "variant", variant)
    if not (weight > 0).all():
        raise Refused(f"sample {variant[int(np.argmin(weight))]['id']!r} has no {rules.weight} to score")
    values = {side: _values(rules, side, rows, weight) for side, rows in sides.items()}
    return Pairs(values["baseline"], values["variant"], weight, tuple(zip(baseline, variant, strict=True)))


def _same_samples(baseline: Sequence[Row], variant: Sequence[Row]) -> None:
    """Both sides hold the same samples, once each, in the same order."""
    if not baseline or not variant:
        raise Refused(f"nothing was evaluated: {len(baseline)} baseline and {len(variant)} variant samples")
    for side, rows in (("baseline", baseline), ("variant", variant)):
        ids = [row["id"] for row in rows]
        if len(set(ids)) != len(ids):
            doubled = next(name for place, name in enumerate(ids) if name in ids[:place])
            raise Refused(f"the {side} holds sample {doubled!r} more than once")
    missing = {row["id"] for row in baseline} ^ {row["id"] for row in variant}
    if missing:
        counts = f"{len(baseline)} baseline and {len(variant)} variant samples"
        raise Refused(f"sample {min(missing, key=str)!r} is on one side only, of {counts}")
    for place, (ours, theirs) in enumerate(zip(baseline, variant, strict=True)):
        if ours["id"] != theirs["id"]:
            raise Refused(f"the order differs at place {place}: {ours['id']!r} and {theirs['id']!r}")


def _same_text(fields: tuple[str, ...], ours: Row, theirs: Row) -> None:
    for field in fields:
        if ours.get(field) is None or ours.get(field) != theirs.get(field):
            found = f"{ours.get(field)!r} and {theirs.get(field)!r}"
            raise Refused(f"sample {ours['id']!r} differs between the sides in its {field}: {found}")


def _untruncated(side: str, rows: Sequence[Row]) -> None:
    cut = next((row["id"] for row in rows if row.get("truncated")), None)
    if cut is not None:
        raise Refused(f"the {side}'s context of sample {cut!r} was truncated; raise max_length or drop the sample")


def _column(field: str, side: str, rows: Sequence[Row]) -> NDArray[np.float64]:
    """One field of all rows as float64 (n,); a value that is absent, no number, or not finite is refused."""
    for row in rows:
        value = row.get(field)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise Refused(f"the {side}'s {field} of sample {row['id']!r} is not a finite number")
    return np.asarray([row[field] for row in rows], float)


def _values(rules: Kind, side: str, rows: Sequence[Row], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    if rules.between and side == "baseline":
        return np.zeros(len(rows))
    values = _column(rules.value, side, rows)
    bad = ~((values >= rules.low * weight) & (values <= rules.high * weight))
    if bad.any():
        place = int(np.argmax(bad))
        raise Refused(f"the {side}'s {rules.value} of sample {rows[place]['id']!r} cannot be {values[place]:g}")
    return values * rules.scale
