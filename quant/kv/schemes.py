"""The table of KV-cache schemes: how keys and values are rounded, in how many bits, and who serves it.

An engine stores what it can read from a checkpoint (`served`). A scheme without such an engine is "emulated only": the
loss measured is real, but nothing serves it from these files, and reports say so.

    fp8         static scales beside the weights: absmax / 448 of calibration texts, or 1 ("cast")
    int8        one scale per token and head
    int4        KIVI: keys per channel over groups of tokens, values per token; the newest tokens stay as they are
    int4-token  keys and values per token in groups of channels
    nvfp4       FP4 with an E4M3 scale per 16 channels
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from compress.errors import RecipeError
from quant.elements import E4M3_MAX
from quant.formats import Option
from quant.kv import rounding
from quant.kv.rounding import Rounding

__all__ = ["SCHEMES", "KvFamily", "KvScheme", "make_scheme"]

STRATEGIES = {"tensor": "tensor", "head": "attn_head"}  # granularity -> compressed-tensors' strategy
ENGINES = {"tensor": "vLLM and SGLang", "head": "vLLM with FlashAttention 3"}


@dataclass(frozen=True, kw_only=True)
class KvScheme:
    """One scheme with its options bound.

    bits         stored bits per element for a head dimension, scales included
    served       who reads it from the checkpoint; "" for emulated only
    arguments    compressed-tensors' QuantizationArgs for `kv_cache_scheme`; None where that cannot say it
    scale_shape  shape of a layer's stored scale for a number of heads; None: scales are found at run time
    largest      end of the grid, which the calibrated absmax is put on
    residual     the newest tokens are kept in blocks of this many, and rounded when the next block begins; 0: at once
    divides      the head dimension must be a multiple of this
    """

    name: str
    options: Mapping[str, Any]
    bits: Callable[[int], float]
    keys: Rounding
    values: Rounding
    served: str = ""
    arguments: Mapping[str, Any] | None = None
    scale_shape: Callable[[int], tuple[int, ...]] | None = None
    largest: float = E4M3_MAX
    residual: int = 0
    divides: int = 1

    @property
    def label(self) -> str:
        """Name and options in words."""
        options = ", ".join(f"{key} {value}" for key, value in self.options.items())
        return f"{self.name} ({options})" if options else self.name

    @property
    def serving(self) -> str:
        """Who serves it, in words."""
        return f"served by {self.served}" if self.served else "emulated only: no engine serves it from a checkpoint"


@dataclass(frozen=True)
class KvFamily:
    """A row of the table: what it is, the builder, and its options by name."""

    summary: str
    build: Callable[..., KvScheme]
    options: Mapping[str, Option] = field(default_factory=dict)


def _fp8(*, granularity: str) -> KvScheme:
    per_head = granularity == "head"
    return KvScheme(
        name="fp8",
        options={"granularity": granularity},
        bits=lambda dim: 8,
        keys=rounding.fp8,
        values=rounding.fp8,
        served=ENGINES[granularity],
        arguments={
            "num_bits": 8,
            "type": "float",
            "strategy": STRATEGIES[granularity],
            "symmetric": True,
            "dynamic": False,
        },
        scale_shape=lambda heads: (heads, 1, 1) if per_head else (1,),
    )


def _int8() -> KvScheme:
    return KvScheme(name="int8", options={}, bits=lambda dim: 8 + 32 / dim, keys=rounding.int8, values=rounding.int8)


def _int4(*, group_size: int, residual: int) -> KvScheme:
    if residual < group_size:
        raise RecipeError(f"residual {residual} is below group_size {group_size}: tokens wait until a group is full")
    return KvScheme(
        name="int4",
        options={"group_size": group_size, "residual": residual},
        bits=lambda dim: 4 + 32 / group_size,
        keys=_unscaled(rounding.int4_by_channel, group_size),
        values=_unscaled(rounding.int4_by_token, group_size),
        residual=residual,
        divides=group_size,
    )


def _int4_token(*, group_size: int) -> KvScheme:
    by_token = _unscaled(rounding.int4_by_token, group_size)
    return KvScheme(
        name="int4-token",
        options={"group_size": group_size},
        bits=lambda dim: 4 + 32 / group_size,
        keys=by_token,
        values=by_token,
        divides=group_size,
    )


def _nvfp4() -> KvScheme:
    both = rounding.nvfp4
    return KvScheme(name="nvfp4", options={}, bits=lambda dim: 4.5, keys=both, values=both, divides=16)


def _unscaled(function: Callable[[Tensor, int], Tensor], size: int) -> Rounding:
    return lambda x, _: function(x, size)


GROUP = Option(32, (32, 64, 128), "elements that share one scale and minimum")

SCHEMES: Mapping[str, KvFamily] = {
    "fp8": KvFamily(
        "FP8 E4M3 with static scales",
        _fp8,
        {"granularity": Option("tensor", ("tensor", "head"), "keys or values of a layer that share one scale")},
    ),
    "int8": KvFamily("INT8 with one scale per token and head", _int8),
    "int4": KvFamily(
        "INT4, keys per channel, values per token, as KIVI",
        _int4,
        {"group_size": GROUP, "residual": Option(32, (32, 64, 128, 256), "newest tokens kept in blocks of so many")},
    ),
    "int4-token": KvFamily("INT4, keys and values per token", _int4_token, {"group_size": GROUP}),
    "nvfp4": KvFamily("FP4 E2M1 with one E4M3 scale per 16 channels", _nvfp4),
}


def make_scheme(name: str, **options: Any) -> KvScheme:
    """The scheme `name` with `options` bound and defaults for the rest.

    Raises:
        RecipeError: the name, an option, or an option's value is not in `SCHEMES`.
    """
    family = SCHEMES.get(name)
    if family is None:
        raise RecipeError(f"scheme {name!r} is unknown{_hint(name)}; known: {', '.join(SCHEMES)}")
    problems = [problem for key, value in options.items() if (problem := _problem(name, family, key, value))]
    if problems:
        raise RecipeError("; ".join(problems))
    return family.build(**{key: option.default for key, option in family.options.items()} | options)


def _hint(name: str) -> str:
    close = get_close_matches(name, SCHEMES, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _problem(name: str, family: KvFamily, key: str, value: Any) -> str | None:
    if key not in family.options:
        known = f"its options: {', '.join(family.options)}" if family.options else "it takes no options"
        return f"scheme {name!r} has no option {key!r}; {known}"
    allowed = family.options[key].allowed
    if any(type(value) is type(choice) and value == choice for choice in allowed):
        return None
    return f"scheme {name!r} option {key!r} is {value!r}; allowed: {', '.join(map(str, allowed))}"
