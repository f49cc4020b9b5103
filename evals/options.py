"""What a recipe may say under `evals` and `gate`; checked when the recipe is read, before anything is loaded.

There are no default margins: how much quality a release may lose is the one thing that only its owner can say.
"""

import math
import re
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["Documents", "Engine", "Evals", "Gate", "MetricOptions", "Problems", "Task", "Waiver"]

STRICT = ConfigDict(frozen=True, extra="forbid")
MOST = 100_000  # samples of a set: more is a slip, and would be drawn for hours before anything else is looked at


def _percent(value: Any) -> float:
    """`3%` or 0.03 as a fraction."""
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*%\s*", value) if isinstance(value, str) else None
    try:
        number = float(found[1]) / 100 if found else float(value)
    except (TypeError, ValueError):
        raise ValueError("write a percentage, for example 3%") from None
    if not (math.isfinite(number) and 0 < number < 10):
        raise ValueError("the margin must be above 0% and below 1000%")
    return number


Percent = Annotated[float, BeforeValidator(_percent)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Looks = tuple[Annotated[int, Field(gt=0)], ...]


class Documents(BaseModel):
    """Texts whose perplexity is measured."""

    model_config = STRICT

    source: str = Field(description="python-docs, wikitext, or a path to .jsonl, .txt or .parquet")
    count: int = Field(default=64, gt=0, le=MOST)
    max_tokens: int = Field(default=512, gt=1, description="tokens scored per document")
    field: str | None = Field(default=None, description="column of the text")
    words: int = Field(default=350, gt=0, description="least words of a document cut from python-docs or a .txt")


class Problems(BaseModel):
    """Problems whose answer is scored: worked solutions, or a fact to be found again in a long text."""

    model_config = STRICT

    source: str = Field(description="arithmetic, gsm8k, recall, or a path to .jsonl")
    count: int = Field(default=120, gt=0, le=MOST)
    question: str = Field(default="question", description="column of the question")
    answer: str = Field(default="answer", description="column of the worked solution")
    words: int | None = Field(default=None, gt=0, description="least words of text around the facts of recall")

    @model_validator(mode="after")
    def _words_have_a_text(self) -> "Problems":
        if self.words and self.source != "recall":
            raise ValueError(f"words is the length of recall's text, leave it out for {self.source}")
        return self


class Task(BaseModel):
    """An lm-eval task: one of its names, or a YAML file."""

    model_config = STRICT

    source: str = Field(description="name of an lm-eval task, or path of its YAML")
    count: int = Field(default=200, gt=0, le=MOST)
    metric: str = "acc"
    filter: str = "none"
    num_fewshot: int | None = Field(default=None, ge=0)
    chat_template: bool = False
    max_new_tokens: int | None = Field(default=None, gt=0)


class Engine(BaseModel):
    """How both sides are computed; part of what makes two scores comparable."""

    model_config = STRICT

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_length: int = Field(default=2048, gt=1)
    batch_tokens: int = Field(default=4096, gt=0)
    add_bos_token: bool = False
    attention: Literal["sdpa", "eager"] = "sdpa"


class Evals(BaseModel):
    """Which documents, problems and tasks; how many; from where."""

    model_config = STRICT

    seed: int = 1234
    engine: Engine = Engine()
    documents: dict[str, Documents] = {}
    problems: dict[str, Problems] = {}
    tasks: dict[str, Task] = {}

    @model_validator(mode="after")
    def _distinct(self) -> "Evals":
        names = [*self.documents, *self.problems, *self.tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is used twice: documents, problems and tasks share one set of names")
        return self

    def count_of(self, name: str) -> int:
        """How many samples the set of this name has."""
        found: Documents | Problems | Task = getattr(self, self.kind_of(name) or "")[name]
        return found.count

    def kind_of(self, name: str) -> str | None:
        """Which of documents, problems, tasks has this name."""
        return next((kind for kind in ("documents", "problems", "tasks") if name in getattr(self, kind)), None)


class LogPerplexity(BaseModel):
    """Perplexity of documents may grow by less than `max_increase`."""

    model_config = STRICT

    kind: Literal["log_perplexity"]
    data: str | None = None
    max_increase: Percent
    required: bool = True
    min_units: int = Field(default=20, ge=2)
    looks: Looks = ()

    @property
    def margin(self) -> float:
        """Fraction of the perplexity."""
        return self.max_increase


class GoldNll(BaseModel):
    """The NLL of worked solutions may grow by less than `max_increase` nats per token."""

    model_config = STRICT

    kind: Literal["gold_nll"]
    data: str | None = None
    max_increase: Positive
    required: bool = True
    min_units: int = Field(default=20, ge=2)
    looks: Looks = ()

    @property
    def margin(self) -> float:
        """Nats per token."""
        return self.max_increase


class Kl(BaseModel):
    """KL(source || variant) in nats per token must be below `max`."""

    model_config = STRICT

    kind: Literal["kl"]
    data: str | None = None
    max: Positive
    required: bool = True
    min_units: int = Field(default=20, ge=2)
    looks: Looks = ()

    @property
    def margin(self) -> float:
        """Nats per token."""
        return self.max


class Accuracy(BaseModel):
    """Accuracy on a task may fall by less than `max_loss_pp` percentage points."""

    model_config = STRICT

    kind: Literal["accuracy"]
    data: str | None = None
    max_loss_pp: Annotated[float, Field(gt=0, lt=100)]
    required: bool = True
    min_units: int = Field(default=20, ge=2)
    looks: Looks = ()
    chance: float = Field(default=0.0, ge=0, lt=1)
    min_signal_pp: float = Field(default=10.0, ge=0)
    cap_hit_max: Percent = 0.05

    @property
    def margin(self) -> float:
        """Fraction."""
        return self.max_loss_pp / 100


MetricOptions = Annotated[LogPerplexity | GoldNll | Kl | Accuracy, Field(discriminator="kind")]
MEASURES = {
    "log_perplexity": ("documents",),
    "gold_nll": ("problems",),
    "kl": ("documents", "problems"),
    "accuracy": ("tasks",),
}


class Waiver(BaseModel):
    """A person answers for the loss of one metric on one checkpoint, up to and including a day."""

    model_config = STRICT

    metric: str
    checkpoint_sha256: str = Field(pattern="^[0-9a-f]{64}$", description="binds.variant_manifest of gate.json")
    reason: str = Field(min_length=1)
    by: str = Field(min_length=1)
    until: date


class Gate(BaseModel):
    """What the variant may lose."""

    model_config = STRICT

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    aa_samples: int = Field(default=8, ge=0)
    allow_identical: bool = False
    stages: bool = Field(default=False, description="measure what every stage lost, for the report")
    metrics: dict[str, MetricOptions] = Field(min_length=1)
    waivers: tuple[Waiver, ...] = ()

    @model_validator(mode="after")
    def _waivers_have_metrics(self) -> "Gate":
        unknown = sorted({waiver.metric for waiver in self.waivers} - self.metrics.keys())
        if unknown:
            raise ValueError(f"waivers for {', '.join(unknown)}, which gate.metrics does not name")
        return self
