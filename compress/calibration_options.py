"""Which texts a calibrated stage reads, as a recipe says it."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Calibration"]


class Calibration(BaseModel):
    """Which texts a calibrated method reads: `samples` sequences of `length` tokens, mixed from both sources."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: str | None = "python-docs"
    problems: str | None = "arithmetic"
    samples: int = Field(default=64, gt=0)
    length: int = Field(default=512, gt=1)
