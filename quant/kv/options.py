"""What a recipe may say under `kv_cache`; checked when the recipe is read, before anything is loaded."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from compress.calibration_options import Calibration
from compress.errors import RecipeError
from quant.kv.schemes import KvScheme, make_scheme

__all__ = ["KvCache"]


class KvCache(BaseModel):
    """A KV cache in fewer bits; an option left out takes the scheme's default.

    `calibrate` finds static scales: "amax" from the largest magnitudes on `calibration.samples` texts, of each the
    first `calibration.length` tokens; "cast" sets them to 1. Schemes that find their scales at run time have none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheme: str
    granularity: str | None = None
    group_size: int | None = None
    residual: int | None = None
    calibrate: Literal["amax", "cast"] | None = None
    calibration: Calibration = Calibration(samples=32, length=2048)

    @model_validator(mode="after")
    def _legal(self) -> "KvCache":
        try:
            scheme = self.build()
        except RecipeError as error:
            raise ValueError(str(error)) from error
        if self.calibrate and scheme.scale_shape is None:
            raise ValueError(f"scheme {self.scheme!r} finds its scales at run time: leave calibrate out")
        return self

    def build(self) -> KvScheme:
        """The scheme with its options bound."""
        given: dict[str, Any] = {name: getattr(self, name) for name in ("granularity", "group_size", "residual")}
        return make_scheme(self.scheme, **{name: value for name, value in given.items() if value is not None})

    @property
    def calibrated(self) -> bool:
        """Whether calibration texts are read."""
        return self.build().scale_shape is not None and self.calibrate != "cast"
