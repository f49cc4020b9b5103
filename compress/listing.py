"""`compress list`: what there is to name in a recipe."""

import difflib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from compress.errors import InputError
from compress.recipe_file import shipped_recipes
from evals.documents import SOURCES as DOCUMENTS
from evals.problems import SOURCES as PROBLEMS
from evals.task_files import task_names
from quant.formats import FORMATS, Option
from quant.kv.schemes import SCHEMES, make_scheme

__all__ = ["show"]

Rows = list[dict[str, Any]]


def _recipes() -> Rows:
    """The second comment line of a recipe says what it makes."""
    return [
        {
            "recipe": f"{name}.yaml",
            "makes": text.splitlines()[1].removeprefix("# "),
            "command": text.splitlines()[0][2:],
        }
        for name, text in shipped_recipes().items()
    ]


def _formats() -> Rows:
    return [{"format": name, "makes": family.summary, **_options(family.options)} for name, family in FORMATS.items()]


def _kv() -> Rows:
    return [
        {
            "scheme": name,
            "makes": family.summary,
            "served": make_scheme(name).served or "emulated only",
            **_options(family.options),
        }
        for name, family in SCHEMES.items()
    ]


def _options(options: Mapping[str, Option]) -> dict[str, Any]:
    return {
        "options": {key: [str(value) for value in option.allowed] for key, option in options.items()},
        "defaults": {key: str(option.default) for key, option in options.items()},
    }


def _tasks() -> Rows:
    ours = [{"task": name, "kind": "evals.documents"} for name in DOCUMENTS]
    ours += [{"task": name, "kind": "evals.problems"} for name in PROBLEMS]
    return ours + [{"task": name, "kind": "evals.tasks (lm-eval)"} for name in task_names()]


TOPICS: Mapping[str, Callable[[], Rows]] = {"recipes": _recipes, "formats": _formats, "kv": _kv, "tasks": _tasks}


def show(what: str, *, as_json: bool) -> None:
    """Print one list.

    Raises:
        InputError: no such list.
    """
    if what not in TOPICS:
        near = difflib.get_close_matches(what, TOPICS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(TOPICS)}"
        raise InputError(f"there is no list of {what!r}: {hint}")
    rows = TOPICS[what]()
    if as_json:
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    table = Table(header_style="bold")
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {'|'.join(v) if isinstance(v, list) else v}" for key, v in value.items()) or "–"
    return str(value)
