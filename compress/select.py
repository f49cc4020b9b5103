"""The one language that says which layers a stage touches.

An entry is an exact module name, a class name (Linear, Embedding, …), or `re:` and a regular expression that is
anchored at the start, as in compressed-tensors. When several match, exact beats regex beats class; ignore beats
targets. An entry that matches nothing is an error, in ignore too: a misspelt name must not silently mean "all".
"""

import difflib
import re
from collections.abc import Sequence

from compress.errors import RecipeError
from compress.modules import CLASSES, Module

__all__ = ["matches", "select", "strength"]


def strength(entries: Sequence[str], name: str, cls: str) -> int:
    """How the strongest entry matches a module of this name and class: 3 exact name, 2 regex, 1 class, 0 not at all."""
    return max((_strength(entry, name, cls) for entry in entries), default=0)


def matches(entries: Sequence[str], module: Module) -> int:
    """`strength` for a module."""
    return strength(entries, module.name, module.cls)


def _strength(entry: str, name: str, cls: str) -> int:
    if entry.startswith("re:"):
        return 2 if re.match(entry[3:], name) else 0
    return 3 if entry == name else int(entry == cls)


def select(modules: Sequence[Module], targets: Sequence[str], ignore: Sequence[str]) -> list[Module]:
    """The modules that `targets` name and `ignore` does not, in file order.

    Raises:
        RecipeError: an entry that matches no module, a bad regular expression, or nothing left; every problem listed.
    """
    problems = [
        problem
        for where, entries in (("targets", targets), ("ignore", ignore))
        for entry in entries
        if (problem := _problem(where, entry, modules))
    ]
    if problems:
        raise RecipeError("; ".join(problems))
    chosen = [module for module in modules if matches(targets, module) and not matches(ignore, module)]
    if not chosen:
        raise RecipeError(
            f"ignore {list(ignore)} leaves nothing of targets {list(targets)}: nothing would be compressed"
        )
    return chosen


def _problem(where: str, entry: str, modules: Sequence[Module]) -> str | None:
    if entry.startswith("re:"):
        try:
            re.compile(entry[3:])
        except re.error as error:
            return f"{where}: {entry!r} is no regular expression ({error})"
    if any(matches([entry], module) for module in modules):
        return None
    known = [*CLASSES, *(module.name for module in modules)]
    if entry in CLASSES:
        return f"{where}: the checkpoint has no module of the class {entry!r}"
    near = difflib.get_close_matches(entry, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"name a module, a class ({', '.join(CLASSES)}) or re:PATTERN"
    return f"{where}: {entry!r} matches no module: {hint}"
