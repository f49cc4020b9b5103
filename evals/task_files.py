"""Finding an lm-eval task by name or path before anything is loaded, and binding the files it depends on.

lm-eval's own index of its 13,000 tasks parses every YAML file (20 s and more); here the names are read off with one
regular expression (2 s), and a path needs neither. The task is then handed to lm-eval as a file of ours that includes
the original and replaces what must not float: local data is copied to a folder named by its hash and cached beside it,
because `datasets` recognises a file by path and time and would serve old rows for new bytes.

Groups and tags of tasks are left out: a gate needs one metric with one meaning.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import yaml

from compress.errors import InputError, Refused

__all__ = ["LOCAL", "TaskFile", "check_task", "task_names", "task_parts", "write_bound"]

LOCAL: Final = ("json", "csv", "parquet", "text", "arrow")  # builders of `datasets` that read files
_NAME: Final = re.compile(r"""^["']?(task|group)["']?:[ \t]*["']?([^\s"'#\[{]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)

Data = Mapping[str, tuple[Path, ...]]


@dataclass(frozen=True)
class TaskFile:
    """A task as found: its YAML merged with what it includes, the files behind it, and its local data by split."""

    name: str
    path: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    data: Data


def check_task(source: str, *, include: Sequence[str | Path] = ()) -> TaskFile:
    """Find a task by the path of its YAML, or by name in the folders `include` and then among lm-eval's own.

    Raises InputError if it is unknown, a group, unreadable, or its local data is missing; Refused if it runs code that
    the model wrote.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        path = _named(source, include)
    elif not path.is_file():
        raise InputError(f"task file {source!r} does not exist")
    path = path.resolve()
    config, files = _read(path, ())
    name = config.get("task")
    if not isinstance(name, str):
        raise InputError(f"{str(path)!r} does not define one task (a line 'task: NAME'), a group has no single metric")
    if config.get("unsafe_code"):
        raise Refused(f"task {name!r} runs code written by the model (unsafe_code), which is not done here")
    return TaskFile(name, path, config, tuple(dict.fromkeys(files)), _local_data(path, config))


def task_names() -> list[str]:
    """The names of lm-eval's own tasks, sorted."""
    return sorted(_scan(_own_folder())["task"])


def task_parts(task: TaskFile) -> dict[str, Any]:
    """What identifies a task for a baseline's key: hashes of its YAML and function files and of its local data."""
    files = sorted(f"{path.name}:{_sha256(path)}" for path in task.files)
    data = {split: [_sha256(path) for path in paths] for split, paths in task.data.items()}
    return {"task": task.name, "files": files, "data": data, "dataset": str(task.config.get("dataset_path"))}


def write_bound(task: TaskFile, folder: Path, *, num_fewshot: int | None = None) -> Path:
    """A YAML file in `folder` that includes the task with its data copied to folders named by hash."""
    bound: dict[str, Any] = {"include": str(task.path)}
    if num_fewshot is not None:
        bound["num_fewshot"] = num_fewshot
    if task.data:
        copies = {split: [str(_copied(path, folder)) for path in paths] for split, paths in task.data.items()}
        kept = dict(task.config.get("dataset_kwargs") or {})
        bound["dataset_kwargs"] = kept | {"data_files": copies, "cache_dir": str(folder / "datasets")}
    text = yaml.safe_dump(bound, sort_keys=True)
    path = (
        folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', task.name)}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _named(name: str, include: Sequence[str | Path]) -> Path:
    found = [_scan(Path(folder)) for folder in (*include, _own_folder())]
    for kinds in found:
        if name in kinds["task"]:
            return kinds["task"][name]
    if any(name in kinds["group"] for kinds in found):
        raise InputError(f"{name!r} is a group of lm-eval tasks without a single metric, name one of its tasks")
    near = get_close_matches(name, [known for kinds in found for known in kinds["task"]], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "see `compress list tasks`, or give the path of a YAML file"
    raise InputError(f"lm-eval task {name!r} is unknown, {hint}")


def _own_folder() -> Path:
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("tasks by name need the package lm-eval, install it")
    return Path(spec.submodule_search_locations[0]) / "tasks"


@cache
def _scan(folder: Path) -> dict[str, dict[str, Path]]:
    """{"task": {name: path}, "group": {…}} of every YAML file below a folder, the first of equal names."""
    found: dict[str, dict[str, Path]] = {"task": {}, "group": {}}
    for path in sorted(folder.rglob("*.yaml")):
        for kind, name in _NAME.findall(path.read_text(encoding="utf-8", errors="replace")):
            found[kind].setdefault(name, path)
    return found


class _Loader(yaml.SafeLoader):
    """YAML with `!function module.name` left as text."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: f"!{suffix} {node.value}")


def _read(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], list[Path]]:
    """The merged configuration, and the YAML and function files it comes from."""
    if path in above:
        raise InputError(f"task file {str(path)!r} includes itself")
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot read the task file {str(path)!r}: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"task file {str(path)!r} holds no table of options")
    merged: dict[str, Any] = {}
    files = [path, *_functions(path.parent, config)]
    included = config.pop("include", [])
    for other in [included] if isinstance(included, str) else included:
        theirs, more = _read((path.parent / other).resolve(), (*above, path))
        merged |= theirs
        files += more
    return merged | config, files


def _functions(folder: Path, value: Any) -> Iterator[Path]:
    """The Python files beside a YAML file that its `!function` entries name."""
    if isinstance(value, str) and value.startswith("!function "):
        module = value.removeprefix("!function ").rpartition(".")[0]
        path = folder / f"{module.replace('.', '/')}.py"
        yield from [path] if path.is_file() else []
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _functions(folder, part)


def _local_data(path: Path, config: Mapping[str, Any]) -> Data:
    """Files by split of a task on local data, empty for one on a hub data set."""
    given = (config.get("dataset_kwargs") or {}).get("data_files")
    if config.get("dataset_path") not in LOCAL or not given:
        return {}
    by_split = given if isinstance(given, dict) else {"train": given}
    return {
        split: tuple(found for pattern in _listed(patterns) for found in _matching(path, str(pattern)))
        for split, patterns in by_split.items()
    }


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _matching(task: Path, pattern: str) -> list[Path]:
    """The files a pattern means, relative to the task's file or else to the working directory."""
    if "://" in pattern:
        raise InputError(f"task file {str(task)!r} takes data from {pattern}, download it and name the local file")
    for folder in (task.parent, Path.cwd()):
        found = sorted(folder.glob(pattern)) if not Path(pattern).is_absolute() else [Path(pattern)]
        if found and all(file.is_file() for file in found):
            return found
    raise InputError(f"the data file {pattern!r} of the task file {str(task)!r} does not exist")


def _copied(path: Path, folder: Path) -> Path:
    """`path` copied to a folder named by its hash, unless it is there already."""
    digest = _sha256(path)
    copy = folder / f"sha256-{digest}" / path.name
    if not copy.is_file() or _sha256(copy) != digest:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return copy


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
