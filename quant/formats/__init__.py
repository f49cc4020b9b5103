"""The table of number formats: by name, how to build one, and its options with their defaults and legal values."""

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from compress.errors import RecipeError
from quant.format import Format
from quant.formats.bf16 import bf16
from quant.formats.bnb_int8 import bnb_int8
from quant.formats.fp8 import fp8
from quant.formats.fp8_block import fp8_block
from quant.formats.int4 import int4
from quant.formats.int8 import int8
from quant.formats.mx import mxfp4, mxfp8
from quant.formats.nf4 import nf4
from quant.formats.nvfp4 import nvfp4

__all__ = ["FORMATS", "FormatFamily", "Option", "make_format"]


@dataclass(frozen=True)
class Option:
    """One option of a format: its default, every value it may take, and what it does."""

    default: Any
    allowed: tuple[Any, ...]
    meaning: str


@dataclass(frozen=True)
class FormatFamily:
    """A row of the table: one line for `compress list formats`, the builder, and its options by name."""

    summary: str
    build: Callable[..., Format]
    options: Mapping[str, Option] = field(default_factory=dict)


EXPONENT = Option(
    "ceil",
    ("ceil", "even", "floor"),
    "rule of the shared exponent: ceil clips nothing, even is compressed-tensors'",
)

FORMATS: Mapping[str, FormatFamily] = {
    "bf16": FormatFamily("bfloat16, a cast", bf16),
    "fp8": FormatFamily(
        "FP8 E4M3 weights, inputs FP8 per token or with a calibrated scale (W8A8)",
        fp8,
        {
            "strategy": Option("channel", ("channel", "tensor"), "weights that share one scale"),
            "inputs": Option("dynamic", ("dynamic", "static"), "their scale: per token, or one that is calibrated"),
        },
    ),
    "fp8-block": FormatFamily("FP8 E4M3 weights in 128x128 blocks, inputs FP8 per token and 128 columns", fp8_block),
    "int8": FormatFamily("INT8 weights per channel, inputs INT8 per token (W8A8)", int8),
    "int4": FormatFamily(
        "INT4 weights in groups, 16-bit inputs (W4A16)",
        int4,
        {
            "group_size": Option(128, (32, 64, 128), "columns that share one scale"),
            "symmetric": Option(True, (True, False), "without a zero point"),
        },
    ),
    "mxfp4": FormatFamily(
        "MXFP4 weights, 16-bit or MXFP4 inputs",
        mxfp4,
        {"activations": Option(False, (False, True), "inputs in MXFP4 too (W4A4)"), "exponent": EXPONENT},
    ),
    "mxfp8": FormatFamily(
        "MXFP8 weights, MXFP8 or 16-bit inputs",
        mxfp8,
        {"activations": Option(True, (True, False), "inputs in MXFP8 too (W8A8)"), "exponent": EXPONENT},
    ),
    "nvfp4": FormatFamily(
        "NVFP4 weights, 16-bit or NVFP4 inputs",
        nvfp4,
        {"activations": Option(False, (False, True), "inputs in NVFP4 too (W4A4), with a calibrated scale")},
    ),
    "nf4": FormatFamily("NF4 weights in blocks of 64, 16-bit inputs, through bitsandbytes", nf4),
    "bnb-int8": FormatFamily("INT8 weights per channel, LLM.int8() inputs, through bitsandbytes", bnb_int8),
}


def make_format(name: str, **options: Any) -> Format:
    """The format `name` with `options` bound and defaults for the rest.

    Raises:
        RecipeError: the name, an option, or an option's value is not in `FORMATS`.
    """
    family = FORMATS.get(name)
    if family is None:
        raise RecipeError(f"format {name!r} is unknown{_hint(name, FORMATS)}; known: {', '.join(FORMATS)}")
    problems = [problem for key, value in options.items() if (problem := _problem(name, key, value))]
    if problems:
        raise RecipeError("; ".join(problems))
    defaults = {key: option.default for key, option in family.options.items()}
    return family.build(**(defaults | options))


def _problem(name: str, key: str, value: Any) -> str | None:
    options = FORMATS[name].options
    if key not in options:
        known = f"its options: {', '.join(options)}" if options else "it takes no options"
        return f"format {name!r} has no option {key!r}{_hint(key, options)}; {known}"
    allowed = options[key].allowed
    if any(type(value) is type(choice) and value == choice for choice in allowed):
        return None  # the type as well: True == 1
    return f"format {name!r} option {key!r} is {value!r}; allowed: {', '.join(str(choice) for choice in allowed)}"


def _hint(word: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _rebuild(name: str, options: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Format:
    return replace(make_format(name, **options), activations=activations)  # a checkpoint may have others


copyreg.pickle(Format, lambda fmt: (_rebuild, (fmt.name, dict(fmt.options), fmt.activations)))  # functions stay here
