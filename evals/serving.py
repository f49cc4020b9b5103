"""Serving figures by the field's definitions, from the raw times of each request.

    TTFT         first token - request sent
    TPOT         (last token - first token) / (tokens - 1), per request: vLLM's definition. (What GuideLLM prints under
                 this name divides by all tokens and includes the first; its "ITL" is this one.)
    end to end   last token - request sent
    tokens/s     answer tokens of all requests / time from the first request sent to the last token
    goodput      requests per second that met every target

A percentile is given only where at least one request lies beyond it: p90 from 10 requests on, p99 from 100. Two sides
are compared round by round, measured in turns, so that what the machine does meanwhile hits both: the ratio is the
geometric mean over rounds with a two-sided 95% interval (Student's t on the logarithms), and none from one round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

__all__ = ["DEFINITIONS", "Ratio", "Round", "Timed", "compare", "ratio", "spread", "summarize"]

DEFINITIONS = {
    "ttft": "seconds from sending a request to its first token",
    "tpot": "seconds per token after the first, (last - first) / (tokens - 1), as vLLM defines it",
    "e2e": "seconds from sending a request to its last token",
    "tokens_per_second": "answer tokens of all requests over the time from the first request to the last token",
    "goodput": "requests per second that met every target",
}
PERCENTILES = (50, 90, 99)
LEVEL = 0.95


@dataclass(frozen=True)
class Timed:
    """One request, in seconds of one clock: when it was sent, and when its first and last token came."""

    start: float
    first: float
    last: float
    tokens: int
    prompt: int

    def __post_init__(self) -> None:
        if not self.start <= self.first <= self.last or self.tokens < 1:
            raise ValueError(
                f"no request is sent at {self.start}, with tokens {self.tokens} at {self.first}-{self.last}"
            )

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.first - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None for an answer of one token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def e2e(self) -> float:
        """Seconds until the last token."""
        return self.last - self.start


@dataclass(frozen=True)
class Round:
    """The requests of one turn of one side, and how many failed."""

    requests: tuple[Timed, ...]
    failed: int = 0

    @property
    def seconds(self) -> float:
        """From the first request sent to the last token."""
        return max(request.last for request in self.requests) - min(request.start for request in self.requests)


@dataclass(frozen=True)
class Ratio:
    """Variant over baseline; bounds are None from fewer than two rounds."""

    estimate: float
    lower: float | None
    upper: float | None


def spread(values: Sequence[float]) -> dict[str, float | None] | None:
    """Mean, deviation, range and percentiles (linear interpolation); None where there is no value."""
    if not values:
        return None
    found = np.asarray(values, float)
    percentiles = {
        f"p{q}": float(np.percentile(found, q)) if len(found) * (100 - q) >= 100 or q == 50 else None
        for q in PERCENTILES
    }
    deviation = float(found.std(ddof=1)) if len(found) > 1 else None
    ends = {"lowest": float(found.min()), "highest": float(found.max())}
    return {"mean": float(found.mean()), "std": deviation, **ends, **percentiles}


def summarize(rounds: Sequence[Round], targets: Mapping[str, float] | None = None) -> dict[str, Any]:
    """All requests of a side as plain data, seconds; `targets` may hold `ttft`, `tpot` and `e2e` in seconds."""
    requests = [request for found in rounds for request in found.requests]
    seconds = sum(found.seconds for found in rounds)
    tokens = sum(request.tokens for request in requests)
    out: dict[str, Any] = {
        "requests": len(requests),
        "failed": sum(found.failed for found in rounds),
        "prompt_tokens": spread([request.prompt for request in requests]),
        "answer_tokens": spread([request.tokens for request in requests]),
        "ttft": spread([request.ttft for request in requests]),
        "tpot": spread([request.tpot for request in requests if request.tpot is not None]),
        "e2e": spread([request.e2e for request in requests]),
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
    }
    if targets and seconds > 0:
        out["goodput"] = sum(_meets(request, targets) for request in requests) / seconds
    return out


def compare(baseline: Sequence[Round], variant: Sequence[Round]) -> dict[str, Ratio]:
    """Variant over baseline of each figure, round by round; a figure that one side lacks is left out."""
    sides = [[_figures(found) for found in rounds] for rounds in (baseline, variant)]
    out = {}
    for name in ("ttft", "tpot", "tokens_per_second"):
        pairs = [(ours[name], theirs[name]) for ours, theirs in zip(*sides, strict=True)]
        if all(before and after for before, after in pairs):
            out[name] = ratio([float(before or 0) for before, _ in pairs], [float(after or 0) for _, after in pairs])
    return out


def ratio(baseline: Sequence[float], variant: Sequence[float]) -> Ratio:
    """Geometric mean of variant over baseline, paired, with its 95% interval; all values above 0."""
    logs = np.log(np.asarray(variant, float)) - np.log(np.asarray(baseline, float))
    middle, n = float(logs.mean()), len(logs)
    if n < 2:
        return Ratio(math.exp(middle), None, None)
    reach = float(student.ppf((1 + LEVEL) / 2, n - 1)) * float(logs.std(ddof=1)) / math.sqrt(n)
    return Ratio(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _figures(found: Round) -> dict[str, float | None]:
    """A round as single numbers: medians over its requests, and its throughput."""
    return {
        "ttft": _median([request.ttft for request in found.requests]),
        "tpot": _median([request.tpot for request in found.requests if request.tpot is not None]),
        "tokens_per_second": sum(r.tokens for r in found.requests) / found.seconds if found.seconds > 0 else None,
    }


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _meets(request: Timed, targets: Mapping[str, float]) -> bool:
    found = {"ttft": request.ttft, "tpot": request.tpot or 0.0, "e2e": request.e2e}
    return all(found[name] <= limit for name, limit in targets.items())
