"""The table of number formats: by name, how to build one, and its options with their defaults and legal values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from compress.errors import RecipeError
from quant.format import Format
from quant.formats.fp8 import fp8
from quant.formats.int4 import int4

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


FORMATS: Mapping[str, FormatFamily] = {
    "fp8": FormatFamily(
        "FP8 E4M3 weights, inputs FP8 per token (W8A8)",
        fp8,
        {"strategy": Option("channel", ("channel", "tensor"), "weights that share one scale")},
    ),
    "int4": FormatFamily(
        "INT4 weights in groups, 16-bit inputs (W4A16)",
        int4,
        {
            "group_size": Option(128, (32, 64, 128), "columns that share one scale"),
            "symmetric": Option(True, (True, False), "without a zero point"),
        },
    ),
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
