"""The recipe: what to make, what it may lose, where it goes. Frozen, complete, refused whole when anything is wrong."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from compress.fit import Fit
from compress.push_options import PushOptions
from distill.options import Distill, Draft
from evals.options import MEASURES, Evals, Gate
from prune.options import Prune
from quant.kv.options import KvCache
from quant.options import Quantize

__all__ = ["Recipe", "Stage"]

STRICT = ConfigDict(frozen=True, extra="forbid")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(value: Any) -> int:
    found = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(value).strip())
    if not found or found[2].upper() not in UNITS:
        raise ValueError("write a size, for example 5GB or 200MiB")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size <= 0:
        raise ValueError("the size must be above 0")
    return size


Size = Annotated[int, BeforeValidator(_bytes)]


class Stage(BaseModel):
    """One step from a checkpoint to a smaller one: exactly one of its fields."""

    model_config = STRICT

    quantize: Quantize | None = None
    kv_cache: KvCache | None = None
    distill: Distill | None = None
    draft: Draft | None = None
    prune: Prune | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> "Stage":
        if len(self.model_fields_set) != 1 or None in self._given().values():
            raise ValueError(f"a stage has exactly one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def name(self) -> str:
        """The stage's verb."""
        return next(iter(self._given()))

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}


class Recipe(BaseModel):
    """Everything a run needs to know."""

    model_config = STRICT

    model: str = "demo"
    revision: str | None = None
    trust_remote_code: bool = False
    output: str = Field(min_length=1)
    device: str = "auto"
    max_shard_size: Size = 5 * 10**9
    stages: tuple[Stage, ...] = Field(min_length=1)
    evals: Evals
    gate: Gate
    fit: Fit | None = None
    push: PushOptions | None = None

    @model_validator(mode="after")
    def _draft_is_last(self) -> "Recipe":
        if any(stage.name == "draft" for stage in self.stages[:-1]):
            raise ValueError("stages: a draft learns from what is released, so it comes last")
        return self

    @model_validator(mode="after")
    def _metrics_have_data(self) -> "Recipe":
        problems = [problem for name in self.gate.metrics if (problem := self._data_problem(name))]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def data_of(self, metric: str) -> str:
        """The sample set a metric is measured on: its `data`, else the set of its own name, else the first fitting."""
        options = self.gate.metrics[metric]
        fitting = [name for kind in MEASURES[options.kind] for name in getattr(self.evals, kind)]
        return options.data or (metric if metric in fitting or not fitting else fitting[0])

    def _data_problem(self, metric: str) -> str | None:
        options = self.gate.metrics[metric]
        data = self.data_of(metric)
        kinds = MEASURES[options.kind]
        if self.evals.kind_of(data) in kinds:
            return None
        places = " or ".join(f"evals.{kind}.{data}" for kind in kinds)
        return f"gate.metrics.{metric}: {options.kind} needs {places}, which is missing"
