"""What a recipe may say under `distill`; checked when the recipe is read, before anything is loaded."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.calibration_options import Calibration
from distill.losses import Loss
from distill.schedule import Schedule

__all__ = ["Distill", "Draft", "LossOptions", "Mix", "Training", "WarmStart"]

STRICT = ConfigDict(frozen=True, extra="forbid")
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class LossOptions(BaseModel):
    """What is minimised: a divergence from the teacher, and `ce` of it the text's own tokens instead.

    `beta` is the teacher's share of the mixture in the Jensen-Shannon divergence.
    """

    model_config = STRICT

    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    beta: float = Field(default=0.5, gt=0, lt=1)
    temperature: float = Field(default=1.0, gt=0, le=10)
    ce: Fraction = 0.0

    def build(self) -> Loss:
        """The loss as plain data."""
        return Loss(self.divergence, self.beta, self.temperature, self.ce)


class Mix(BaseModel):
    """Texts by source and their share of the rows. Half of the problems are chats, where the model has a chat template,
    and of a chat only the answer is learnt."""

    model_config = STRICT

    documents: dict[str, Weight] = {"python-docs": 0.5}
    problems: dict[str, Weight] = {"arithmetic": 0.5}

    @model_validator(mode="after")
    def _some(self) -> "Mix":
        if not self.documents and not self.problems:
            raise ValueError("name at least one source of documents or problems, or say data: self")
        return self


class Training(BaseModel):
    """How long and how fast: `steps` updates of `batch` sequences of `length` tokens.

    `micro_batch` sequences are in memory at a time; `warmup` is a fraction of the steps, `final_rate` of the rate; with
    `precision: auto` arithmetic is bf16 on a GPU and fp32 on a CPU, while weights and moments are always fp32.
    """

    model_config = STRICT

    steps: int = Field(default=200, gt=0)
    batch: int = Field(default=8, gt=0)
    micro_batch: int = Field(default=4, gt=0)
    length: int = Field(default=512, gt=1)
    learning_rate: float = Field(default=5e-5, gt=0, lt=1)
    warmup: Fraction = 0.05
    final_rate: Fraction = 0.1
    weight_decay: float = Field(default=0.0, ge=0, lt=1)
    clip: float = Field(default=1.0, gt=0)
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0

    def build(self) -> Schedule:
        """The schedule as plain data."""
        names = Schedule.__dataclass_fields__
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Schedule(**given)


class WarmStart(BaseModel):
    """Before the training: `steps` updates of each block alone, of `batch` sequences, towards the teacher's block."""

    model_config = STRICT

    steps: int = Field(default=20, gt=0)
    batch: int = Field(default=4, gt=0)
    learning_rate: float = Field(default=1e-4, gt=0, lt=1)
    calibration: Calibration = Calibration()


class Distill(BaseModel):
    """One distillation stage: the stage's input learns to predict as the teacher does.

    `teacher` is "source" (what the run started from) or a directory with the same tokenizer. `data: self` has the
    teacher write `sampled` sequences. With `top_k` the teacher is asked before the training, and its so many likeliest
    next tokens are kept on disk; it is not in memory while the student learns. With `quantized` the student computes
    with weights rounded as the quantize stage after it rounds them. `held_out` sequences are never learnt from; every
    `evaluate_every` steps the KL on them is measured, the best state is what is kept, and `patience` times without a
    better one end it.
    """

    model_config = STRICT

    teacher: str = "source"
    loss: LossOptions = LossOptions()
    data: Mix | Literal["self"] = Mix()
    sampled: int = Field(default=128, gt=1)
    warm_start: WarmStart | None = None
    top_k: int | None = Field(default=None, gt=0)
    quantized: bool = False
    training: Training = Training()
    held_out: int = Field(default=16, gt=0)
    evaluate_every: int = Field(default=25, gt=0)
    patience: int = Field(default=4, gt=0)


class Draft(BaseModel):
    """A draft for speculative decoding: `layers` of the target, of `ffn` channels if that is given, distilled from it.

    It is measured on `prompts` rows held out: their first `prompt_tokens`, continued by `new_tokens`.
    """

    model_config = STRICT

    layers: int = Field(gt=0)
    ffn: int | None = Field(default=None, gt=0)
    distill: Distill = Distill()
    prompts: int = Field(default=8, gt=0)
    prompt_tokens: int = Field(default=64, gt=0)
    new_tokens: int = Field(default=64, gt=1)

    @model_validator(mode="after")
    def _legal(self) -> "Draft":
        if self.distill.teacher != "source":
            raise ValueError("a draft learns from the checkpoint that it guesses for: leave distill.teacher out")
        if self.distill.warm_start or self.distill.quantized:
            raise ValueError("a draft has other layers than its target: leave distill.warm_start and quantized out")
        if self.prompt_tokens > self.distill.training.length:
            raise ValueError("prompt_tokens is above distill.training.length, of which prompts are the beginning")
        return self
