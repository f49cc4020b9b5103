"""What comes from outside, a path or a text, read so that every way it can be wrong is one kind of error."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.errors import InputError

__all__ = ["HUB_ID", "HUB_REPOSITORY", "local_path", "parse_json"]

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")  # old models and data sets of the hub have no owner
HUB_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
Pairs = Callable[[list[tuple[str, Any]]], Any]


def local_path(text: str) -> Path:
    """A path as a user writes it, `~` expanded.

    Raises:
        InputError: a user without a home directory, or a NUL, which no path holds.
    """
    if "\0" in text:
        raise InputError(f"path {text!r} holds a NUL character: give another path")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"path {text!r} names a user without a home directory here: write the path out") from error


def parse_json(text: str | bytes, pairs: Pairs | None = None) -> Any:
    """JSON of any depth and with any number.

    Raises:
        ValueError: no JSON, no UTF-8, nested too deeply, or a number of thousands of digits.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
