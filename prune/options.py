"""What a recipe may say under `prune`; checked when the recipe is read, before anything is loaded."""

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from compress.calibration_options import Calibration
from prune.dims import AXES
from prune.target import Target

__all__ = ["Prune", "Search"]

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "KB": 10**3, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
METHODS = ("obs", "activation", "random")
SCORES = ("kl", "cosine")


class Search(BaseModel):
    """How the split of a target between several axes is found: `candidates` are pruned on `samples` calibration
    sequences and scored by KL from the source on `held_out` others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidates: int = Field(default=4, gt=1)
    samples: int = Field(default=16, gt=0)
    held_out: int = Field(default=4, gt=0)


class Prune(BaseModel):
    """One pruning stage.

    target     {params: -10%}, {params: 120M}, {memory: 200MB}, or dims by their names in config.json
    axes       what may shrink; if there are several, a search finds out how much of each
    search     null: no search; the axes that are named first give most
    tolerance  how far from the target's size a result may be, as a part of the source's size
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: dict[str, str | int] = Field(min_length=1)
    axes: tuple[str, ...] = ("ffn",)
    method: str = "obs"
    layer_score: str = "kl"
    round_to: int = Field(default=64, gt=0)
    tolerance: str = "1%"
    search: Search | None = Search()
    calibration: Calibration = Calibration()

    @field_validator("axes")
    @classmethod
    def _known_axes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [axis for axis in value if axis not in AXES]
        if unknown or not value or len(set(value)) < len(value):
            raise ValueError(f"axes {list(value)}: name each of {', '.join(AXES)} at most once, and one at least")
        return value

    @field_validator("method", "layer_score")
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        known = METHODS if info.field_name == "method" else SCORES
        if value not in known:
            raise ValueError(f"no {info.field_name} {value!r}: one of {', '.join(known)}")
        return value

    @model_validator(mode="after")
    def _target_reads(self) -> "Prune":
        self.goal()
        return self

    def goal(self) -> Target | dict[str, int]:
        """The target, or the dims by axis."""
        by_name = {key: axis for axis, keys in AXES.items() for key in keys}
        if len(self.target) == 1 and set(self.target) <= {"params", "memory"}:
            unit, text = next(iter(self.target.items()))
            amount, relative = _amount(str(text))
            return Target(unit, amount, relative, _fraction(self.tolerance))
        unknown = [key for key in self.target if key not in by_name]
        if unknown:
            raise ValueError(f"target {unknown[0]!r}: give params or memory alone, or dims: {', '.join(by_name)}")
        return {by_name[key]: int(value) for key, value in self.target.items()}


def _amount(text: str) -> tuple[float, bool]:
    """(-0.1, relative) of "-10%", (120e6, absolute) of "120M"."""
    found = re.fullmatch(r"(-?[0-9.]+)\s*([A-Za-z]*|%)", text.strip())
    if not found or (found[2] != "%" and found[2].upper() not in UNITS):
        raise ValueError(f"target {text!r}: write a change as -10%, parameters as 120M or memory as 200MB")
    if found[2] == "%":
        value = float(found[1]) / 100
        if not -1 < value < 0:
            raise ValueError(f"target {text!r}: a change is between -100% and 0%")
        return value, True
    return float(found[1]) * UNITS[found[2].upper()], False


def _fraction(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+)\s*%", text.strip())
    if not found:
        raise ValueError(f"tolerance {text!r}: write a percentage, for example 1%")
    return float(found[1]) / 100
