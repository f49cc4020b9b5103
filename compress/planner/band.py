"""An answer that is not known exactly: the lowest, the likeliest and the highest value, in the quantity's own unit.

Engine constants differ between versions. An interval that says so is more use than one number that hides it.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Band"]


@dataclass(frozen=True)
class Band:
    """low <= best <= high."""

    low: float
    best: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.best <= self.high:
            raise ValueError(f"a band wants low <= best <= high, got {self.low}, {self.best}, {self.high}")

    @staticmethod
    def exactly(value: float) -> "Band":
        """A value that is known."""
        return Band(value, value, value)

    def __add__(self, other: "Band") -> "Band":
        return Band(self.low + other.low, self.best + other.best, self.high + other.high)

    def __sub__(self, other: "Band") -> "Band":
        return Band(self.low - other.high, self.best - other.best, self.high - other.low)

    def rising(self, function: Callable[[float], float]) -> "Band":
        """`function` of the band, where it grows with its argument."""
        return Band(function(self.low), function(self.best), function(self.high))
