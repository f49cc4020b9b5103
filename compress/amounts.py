"""How the numbers of a metric are written for people: perplexities, their growth in percent, accuracy in points.

The gate compares nats per token, bits per byte and fractions; a reader thinks in perplexities and percentages. One
table turns one into the other, for the gate's sentences and the report alike. None (not computed) is written as a dash.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["format_bounds", "format_bytes", "format_change", "format_loss", "format_score", "perplexity"]

DASH = "–"


@dataclass(frozen=True)
class _Style:
    """Writers of a score of one side, and of a loss (a bound, a margin) between the sides."""

    score: Callable[[float], str]
    loss: Callable[[float], str]


def perplexity(nats: float | None) -> float | None:
    """exp(nats per token); None where there is no value or the exponential is beyond float64."""
    return None if nats is None or nats > 700 else math.exp(nats)


def _perplexity_text(nats: float) -> str:
    found = perplexity(nats)
    if found is None:
        return "over 1e304 ppl"
    return f"{found:.3f} ppl" if found < 1000 else f"{found:.4g} ppl"


def _growth_text(nats: float) -> str:
    found = perplexity(nats)
    return "over 1e306%" if found is None else f"{100 * (found - 1):+.2f}%"


_STYLES = {
    "log_perplexity": _Style(_perplexity_text, _growth_text),
    "gold_nll": _Style(lambda v: f"{v:.4f}", lambda v: f"{v:+.4f} nats"),
    "bits_per_byte": _Style(lambda v: f"{v:.4f}", lambda v: f"{v:+.4f} bits/B"),
    "kl": _Style(lambda v: f"{v:.4f}", lambda v: f"{v:.4f} nats"),
    "accuracy": _Style(lambda v: f"{100 * v:.1f}%", lambda v: f"{100 * v:+.2f} pp"),
}


def format_score(kind: str, value: float | None) -> str:
    """A side's score of a metric of `kind`; the value is in the gate's unit."""
    return DASH if value is None else _STYLES[kind].score(value)


def format_loss(kind: str, value: float | None) -> str:
    """A loss, bound or margin of a metric of `kind`, worse positive; the value is in the gate's unit."""
    return DASH if value is None else _STYLES[kind].loss(value)


def format_bounds(kind: str, lower: float | None, upper: float | None) -> str:
    """Both bounds of a loss in the unit of its margin, which is left out: `-0.69 to +5.86`."""
    if lower is None or upper is None:
        return DASH
    return " to ".join(format_loss(kind, value).removesuffix("%").split()[0] for value in (lower, upper))


def format_bytes(count: float) -> str:
    """A size in decimal units, as disks and model cards use."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def format_change(before: float, after: float) -> str:
    """What a size became: `163.2 MB, 1.65 times smaller`."""
    ratio = before / after
    if f"{ratio:.2f}" == "1.00":
        return f"{format_bytes(after)}, as before"
    return f"{format_bytes(after)}, " + (f"{ratio:.2f} times smaller" if ratio > 1 else f"{1 / ratio:.2f} times larger")
