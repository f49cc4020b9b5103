"""What a recipe may say under `quantize`; checked when the recipe is read, before anything is loaded."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from compress.calibration_options import Calibration
from compress.errors import RecipeError
from quant.activations import input_scale_name
from quant.format import Format
from quant.formats import make_format
from quant.methods import DEFAULTS, METHODS

__all__ = ["Override", "Quantize"]

STRICT = ConfigDict(frozen=True, extra="forbid")


class FormatOptions(BaseModel):
    """A number format and its options; an option left out takes the format's default."""

    model_config = STRICT

    format: str
    group_size: int | None = None
    symmetric: bool | None = None
    strategy: str | None = None
    activations: bool | None = None
    exponent: str | None = None
    inputs: str | None = None

    @model_validator(mode="after")
    def _legal(self) -> "FormatOptions":
        try:
            self.build()
        except RecipeError as error:
            raise ValueError(str(error)) from error
        return self

    def build(self) -> Format:
        """The format with its options bound."""
        names = ("group_size", "symmetric", "strategy", "activations", "exponent", "inputs")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return make_format(self.format, **{name: value for name, value in given.items() if value is not None})


class Override(FormatOptions):
    """Another format for the modules that `targets` names; `format: bf16` leaves them in 16 bits."""

    targets: tuple[str, ...] = Field(min_length=1)


class Quantize(FormatOptions):
    """One quantization stage; without a method it takes the format's default."""

    method: str
    iterations: int | None = Field(default=None, gt=0)
    calibration: Calibration = Calibration()
    targets: tuple[str, ...] = Field(default=("Linear",), min_length=1)
    ignore: tuple[str, ...] = ("lm_head",)
    overrides: tuple[Override, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _default_method(cls, data: Any) -> Any:
        if isinstance(data, dict) and "method" not in data:
            fallback = "search" if data.get("inputs") == "static" else "rtn"
            return {**data, "method": DEFAULTS.get(str(data.get("format")), fallback)}
        return data

    @model_validator(mode="after")
    def _format_takes_method(self) -> "Quantize":
        method = self.build().quant_method
        if method is None and self.overrides:
            raise ValueError(f"format {self.format!r} is for every layer: leave overrides out, or name another format")
        if not METHODS[self.method].calibrated:
            self._refuse_static()
        if self.iterations is not None and not METHODS[self.method].learn:
            learns = " or ".join(name for name, method in METHODS.items() if method.learn)
            raise ValueError(f"method {self.method!r} does not iterate: leave iterations out, or use {learns}")
        own = method != "compressed-tensors"
        if own and METHODS[self.method].calibrated:
            raise ValueError(f"format {self.format!r} chooses its own codes, so method {self.method!r} cannot: use rtn")
        return self

    def _refuse_static(self) -> None:
        for options in (self, *self.overrides):
            if input_scale_name(options.build().activations):
                fix = " or ".join(name for name, method in METHODS.items() if method.calibrated)
                raise ValueError(
                    f"the inputs of {options.format} need a calibrated scale, which {self.method!r} has not: use {fix}"
                )

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in METHODS:
            raise ValueError(f"no method {value!r}: one of {', '.join(METHODS)}")
        return value
