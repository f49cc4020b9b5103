"""The options of `compress plan`, from words to numbers: `users=160 context=4k ttft=150ms formats=bf16,fp8`.

Every key has one reader in a table; a key, a name or a unit that is not known is an error with the nearest known one.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.errors import InputError

__all__ = ["Ask", "nearest", "parse_options", "parse_seconds"]

COUNTS = {"": 1, "k": 1024, "m": 1024**2}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Ask:
    """What a plan is made for.

    gpu        name of a GPU
    users      requests alive at the same time
    context    tokens a request holds, prompt and answer together
    tp         GPUs that share one copy of the model (tensor parallel); None = try 1, 2, 4, 8
    formats    names of weight formats; empty = the usual ones
    kv         names of KV-cache formats
    ttft, tpot targets in seconds; None = no target
    output     tokens of an answer; None = an eighth of the context
    log        start-up lines of the user's own engine, to calibrate with
    engine     the engine generation whose memory constants are used
    util       share of the GPU the engine may take; None = the engine's default
    seqs       most requests in one batch (max_num_seqs); None = the engine's default
    batched    most tokens in one step (max_num_batched_tokens); None = the engine's default
    """

    gpu: str
    users: int
    context: int
    tp: int | None = None
    formats: tuple[str, ...] = ()
    kv: tuple[str, ...] = ("bf16", "fp8", "int8")
    ttft: float | None = None
    tpot: float | None = None
    output: int | None = None
    log: str | None = None
    engine: str = "vllm"
    util: float | None = None
    seqs: int | None = None
    batched: int | None = None


def nearest(what: str, value: str, known: Sequence[str], aliases: Mapping[str, str] | None = None) -> InputError:
    """The error for a name that is not known, with the nearest one that is, maybe by one of its aliases."""
    named = {**(aliases or {}), **{name: name for name in known}}
    folded = {key.lower(): name for key, name in named.items()}
    near = difflib.get_close_matches(value.lower(), folded, n=1)
    hint = f"did you mean {folded[near[0]]!r}?" if near else f"use one of {', '.join(known)}"
    return InputError(f"{what} {value!r} is not known: {hint}")


def parse_options(options: Mapping[str, str]) -> Ask:
    """Read `key=value` options.

    Raises:
        InputError: an unknown key, a value that cannot be read, or `gpu`, `users` or `context` missing.
    """
    for key in options:
        if key not in READERS:
            raise nearest("option", key, list(READERS))
    missing = [key for key in ("gpu", "users", "context") if key not in options]
    if missing:
        raise InputError(f"{missing[0]}= is missing: say for example gpu=H100-80GB users=160 context=4096")
    ask = Ask(**{key: READERS[key](key, value) for key, value in options.items()})
    if ask.output is not None and ask.output >= ask.context:
        raise InputError(f"output={ask.output} leaves no room for a prompt in context={ask.context}: make it smaller")
    return ask


def _count(key: str, value: str) -> int:
    found = re.fullmatch(r"([0-9]+)([km]?)", value.strip().lower())
    number = int(found[1]) * COUNTS[found[2]] if found else 0
    if number < 1:
        raise InputError(f"{key}={value!r} is not a whole number above 0: say for example {key}=4096 or {key}=4k")
    return number


def parse_seconds(key: str, value: str) -> float:
    """Seconds of a time with a unit, as 150ms.

    Raises:
        InputError: no number above 0, or no unit.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(us|ms|s)", value.strip().lower())
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if not seconds > 0:
        raise InputError(f"{key}={value!r} is not a time above 0: give it a unit, as in {key}=150ms or {key}=0.2s")
    return seconds


def _share(key: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise InputError(f"{key}={value!r} is not a share between 0 and 1: say for example {key}=0.92")
    return share


def _names(key: str, value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip().lower() for name in value.split(",") if name.strip()))
    if not names:
        raise InputError(f"{key}= is empty: name at least one, separated by commas")
    return names


def _text(_key: str, value: str) -> str:
    return value


READERS: dict[str, Callable[[str, str], Any]] = {
    "gpu": _text,
    "users": _count,
    "context": _count,
    "tp": _count,
    "formats": _names,
    "kv": _names,
    "ttft": parse_seconds,
    "tpot": parse_seconds,
    "output": _count,
    "log": _text,
    "engine": _text,
    "util": _share,
    "seqs": _count,
    "batched": _count,
}
