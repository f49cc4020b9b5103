"""Reading a recipe: YAML and dotted overrides in, a frozen Recipe or one error that lists every problem out."""

import copy
import difflib
import importlib.resources
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from compress.errors import RecipeError
from compress.inputs import local_path
from compress.recipe import Recipe
from evals.options import MEASURES

__all__ = ["apply_overrides", "load_recipe", "parse_recipe", "recipe_text", "shipped_recipes"]

HINTS = {
    "max_increase": "say how much loss is allowed, for example 3% (perplexity) or 0.05 (nats); there are no defaults",
    "max": "say how much divergence is allowed, for example 0.2 (nats per token); there are no defaults",
    "max_loss_pp": "say how many percentage points may be lost, for example 2; there are no defaults",
}
PLAIN = {  # pydantic's words for Python's types, in a recipe's
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "string_type": "must be text",
}
MERGE = "tag:yaml.org,2002:merge"  # the key <<, whose values the keys beside it may replace


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice; the library would keep the last one without a word."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    own = [key for key, _ in node.value if key.tag != MERGE]
    keys = [loader.construct_object(key, deep=True) for key in own]
    twice = [key for i, key in enumerate(keys) if key in keys[:i]]
    if twice:
        raise RecipeError(f"line {node.start_mark.line + 1}: the key {twice[0]!r} is given twice")
    return loader.construct_mapping(node, deep=True)


def _parse(text: str) -> Any:
    """YAML as plain data; every way in which a text is none is a `yaml.YAMLError`."""
    try:
        return yaml.load(text, Loader=_Loader)  # derived from SafeLoader
    except (ValueError, RecursionError) as error:  # dates, numbers and depths that Python does not take
        raise yaml.YAMLError(str(error)) from error


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def shipped_recipes() -> dict[str, str]:
    """The recipes that come with the package: name -> text."""
    folder = importlib.resources.files("compress.recipes")
    files = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in sorted(files, key=str)}


def recipe_text(name: str) -> str:
    """The text of a recipe: a path, or the name of a shipped one with or without .yaml.

    Raises:
        RecipeError: neither.
    """
    path = local_path(name)
    shipped = shipped_recipes()
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {name!r} cannot be read ({error})") from error
    if name.removesuffix(".yaml") in shipped:
        return shipped[name.removesuffix(".yaml")]
    near = difflib.get_close_matches(Path(name).name.removesuffix(".yaml"), shipped, n=1)
    hint = f"did you mean {near[0]}.yaml?" if near else f"give a path or one of {', '.join(shipped)}"
    raise RecipeError(f"recipe {name!r} is no file and no shipped recipe: {hint}")


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate.

    Args:
        name: a path or the name of a shipped recipe.
        overrides: `dotted.key=value`; the value is YAML.

    Raises:
        RecipeError: every problem, each with its path, the value and what is allowed.
    """
    return parse_recipe(recipe_text(name), overrides, name)


def parse_recipe(text: str, overrides: Sequence[str] = (), name: str = "recipe") -> Recipe:
    """As `load_recipe`, from the text itself."""
    try:
        tree = _parse(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {name!r} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"recipe {name!r} holds no mapping of keys to values")
    try:
        return Recipe.model_validate(apply_overrides(tree, overrides))
    except ValidationError as error:
        problems = sorted({_sentence(detail) for detail in error.errors(include_url=False) if not _echo(detail)})
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise RecipeError(f"recipe {name!r} has {len(problems)} problem(s):\n{listed}") from error


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set each `dotted.key=value` in a copy of the tree; numbers index lists.

    Raises:
        RecipeError: no `=`, or a path through something that is no mapping or list.
    """
    out = copy.deepcopy(tree)
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals or not path:
            raise RecipeError(f"override {override!r} is not of the form dotted.key=value")
        try:
            _set(out, path.split("."), _parse(value), override)
        except yaml.YAMLError as error:
            raise RecipeError(f"override {override!r} has a value that is not valid YAML") from error
    return out


def _set(tree: Any, path: list[str], value: Any, override: str) -> None:
    *parents, last = path
    for key in parents:
        tree = _child(tree, key, override)
    if isinstance(tree, list):
        tree[_index(tree, last, override)] = value
    elif isinstance(tree, dict):
        tree[last] = value
    else:
        raise RecipeError(f"override {override!r} goes through {tree!r}, which has no keys")


def _child(tree: Any, key: str, override: str) -> Any:
    if isinstance(tree, list):
        return tree[_index(tree, key, override)]
    if not isinstance(tree, dict):
        raise RecipeError(f"override {override!r} goes through {tree!r}, which has no keys")
    if tree.get(key) is None:
        tree[key] = {}
    return tree[key]


def _index(items: list[Any], key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise RecipeError(f"override {override!r}: {key!r} must be a number from 0 to {len(items) - 1}")
    return int(key)


def _echo(detail: ErrorDetails) -> bool:
    """pydantic counts a tuple's items after dropping the wrong ones, and so reports the same mistake twice."""
    return detail["type"] == "too_short" and bool(detail["input"])


def _sentence(detail: ErrorDetails) -> str:
    """One problem: its path, the value, what is allowed."""
    location = _without_kind(detail["loc"])
    path = ".".join(map(str, location)) or "recipe"
    kind, key = detail["type"], str(location[-1]) if location else ""
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_did_you_mean(location)}"
    if kind == "missing":
        return f"{path}: missing; {HINTS.get(key, 'it has no default')}"
    message = PLAIN.get(kind, detail["msg"]).removeprefix("Value error, ")
    message = message if message[:2].isupper() else message[:1].lower() + message[1:]  # "KV-cache" keeps its capitals
    shown = repr(detail["input"])
    return f"{path}: {message}" if len(shown) > 60 else f"{path}: {message} (got {shown})"


def _without_kind(location: tuple[int | str, ...]) -> list[int | str]:
    """The path without the tag of the kind, which pydantic puts behind the name of a metric."""
    return [part for i, part in enumerate(location) if not (i == 3 and location[0] == "gate" and part in MEASURES)]


def _did_you_mean(location: Sequence[int | str]) -> str:
    fields = list(_fields(location[:-1]))
    near = difflib.get_close_matches(str(location[-1]), fields, n=1)
    return f", did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(fields)}" if fields else ""


def _fields(location: Sequence[int | str]) -> Iterator[str]:
    """The keys allowed at a path, found by walking the models."""
    models: list[type[BaseModel]] = [Recipe]
    for part in location:
        if isinstance(part, int) or not any(part in model.model_fields for model in models):
            continue
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [model for annotation in fields for model in _models_in(annotation)]
    yield from dict.fromkeys(name for model in models for name in model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)
    for argument in getattr(annotation, "__metadata__", ()):
        yield from _models_in(argument)
