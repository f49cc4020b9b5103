"""The `fit:` block of a recipe: does the variant hold so many users on that GPU, and did its source?

From the headers of both, without a weight; so it is known before the work, and refused there where it is `required`.
Otherwise it informs and decides nothing. The planner's memory constants of engines are intervals, so the answer can be
"uncertain"; what is required must hold in the worst case seen.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from compress.errors import InputError
from compress.planner.fit import FitReport, fits
from compress.planner.formats import KV_FORMATS
from compress.planner.gpus import find_gpu
from compress.planner.options import nearest

if TYPE_CHECKING:
    from compress.checkpoint import Checkpoint

__all__ = ["SIDES", "Fit", "check_fit", "fit_lines", "fit_record"]

SIDES = ("source", "variant")


def _tokens(value: Any) -> Any:
    """4k is 4096, as on the planner's command line."""
    found = re.fullmatch(r"(\d+)k", str(value).strip().lower())
    return int(found[1]) * 1024 if found else value


class Fit(BaseModel):
    """What the variant is to be served on and for whom; `kv` is taken from the checkpoint unless it is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str
    users: int = Field(ge=1)
    context: Annotated[int, BeforeValidator(_tokens), Field(ge=1)]
    tp: int = Field(default=1, ge=1)
    kv: str | None = None
    required: bool = False

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, name: str) -> str:
        try:
            return find_gpu(name).name
        except InputError as error:
            raise ValueError(str(error)) from error

    @field_validator("kv")
    @classmethod
    def _known_kv(cls, name: str | None) -> str | None:
        if name is not None and name not in KV_FORMATS:
            raise ValueError(str(nearest("KV format", name, list(KV_FORMATS))))
        return name

    @property
    def place(self) -> str:
        """The GPUs, in words."""
        return f"{self.tp} x {self.gpu}"


def check_fit(wanted: Fit | None, variant: "Checkpoint") -> None:
    """Compare what a run will write, from its planned headers.

    Raises:
        InputError: the question has no answer for this model; or it fits not for sure and must.
    """
    if wanted is None:
        return
    found = _fits(wanted, variant)
    if wanted.required and found.verdict != "fits":
        raise InputError(
            f"fit.required is set, and on {wanted.place} the variant is not sure to fit ({found.sentence}): ask for "
            "less, take a smaller format, or leave fit.required out"
        )


def fit_record(wanted: Fit | None, source: "Checkpoint", variant: "Checkpoint") -> dict[str, Any]:
    """The entry of run.json, none where the recipe does not ask."""
    if wanted is None:
        return {}
    found = {name: asdict(_fits(wanted, side)) for name, side in zip(SIDES, (source, variant), strict=True)}
    return {"fit": wanted.model_dump() | found}


def fit_lines(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(where, the source in words, the variant in words) of a stored run; empty where it does not say."""
    found = run.get("fit")
    return [(f"on {found['tp']} x {found['gpu']}", *(found[side]["sentence"] for side in SIDES))] if found else []


def _fits(wanted: Fit, side: "Checkpoint") -> FitReport:
    """With the KV cache an engine would keep of this checkpoint by itself, unless another one is asked for."""
    from quant.kv.config import kv_scheme_of  # brings torch, which a recipe need not wait for

    scheme = kv_scheme_of(side.config)
    kv = wanted.kv or (scheme.name if scheme and scheme.served else "bf16")
    found = fits(side, gpu=wanted.gpu, users=wanted.users, context=wanted.context, kv=kv, tp=wanted.tp)
    if wanted.kv or scheme is None or scheme.served:
        return found
    return replace(found, sentence=f"{found.sentence}; no engine keeps {scheme.name} from a checkpoint")
