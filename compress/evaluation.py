"""Measuring both sides: each in a fresh process that loads the written files, the source at most once.

The parent writes a request, starts `compress.worker`, and reads rows back. What the source scored is kept in the user's
cache under everything the scores depend on, and is reused only on equality.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.environment import environment
from compress.errors import CompressError, Refused
from compress.inputs import parse_json
from compress.manifest import Manifest, build_manifest, canonical_json, compare
from compress.progress import say
from compress.ranks import environment_alone
from compress.recipe import Recipe
from compress.request import Request, raise_error, read_rows
from compress.source import cache_directory
from compress.writer import write_json
from evals.gate import Metric
from evals.samples import Kind, SampleSet, load_samples
from evals.task_files import check_task, task_parts

SEAL = "sealed.json"

__all__ = [
    "Measured",
    "check_tasks",
    "is_whole",
    "load_sets",
    "measure_source",
    "measure_variant",
    "metrics_of",
    "read_measured",
    "scoring",
    "seal_results",
]


@dataclass(frozen=True)
class Measured:
    """What one side scored: rows by sample set or task, and `folder`, where they and the hidden states lie.

    aa          sample set -> largest difference per token of two runs, nats (source only)
    tokenizer   what the tokenizer is made of, as loaded
    kv_cache    what the quantized KV cache held, None for 16 bits
    tasks       task -> what its figure is a figure of, as `evals.tasks.TaskScores.what`
    """

    folder: Path
    rows: dict[str, list[dict[str, Any]]]
    aa: dict[str, float]
    tokenizer: dict[str, Any]
    peak_bytes: int
    seconds: float
    kv_cache: dict[str, Any] | None
    tasks: dict[str, dict[str, Any]]


def metrics_of(recipe: Recipe) -> tuple[Metric, ...]:
    """The gate's metrics as plain data, in the recipe's order."""
    return tuple(_metric(recipe, name) for name in recipe.gate.metrics)


def _metric(recipe: Recipe, name: str) -> Metric:
    options = recipe.gate.metrics[name]
    data = recipe.data_of(name)
    count = recipe.evals.count_of(data)
    metric = Metric(
        id=name,
        kind=options.kind,
        data=data,
        margin=options.margin,
        required=options.required,
        looks=options.looks,
        min_units=options.min_units,
        samples=None if options.looks else count,
    )
    if options.kind != "accuracy":
        return metric
    signal = options.min_signal_pp / 100
    return replace(metric, chance=options.chance, min_signal=signal, cap_hit_max=options.cap_hit_max)


def load_sets(recipe: Recipe) -> list[SampleSet]:
    """The documents and problems that some metric needs.

    Raises:
        InputError, Refused: a source that is unknown, empty, or too small.
    """
    used = used_data(recipe)
    documents = {
        name: (o.source, o.count, {"field": o.field, "words": o.words}) for name, o in recipe.evals.documents.items()
    }
    problems = {
        name: (o.source, o.count, {"columns": (o.question, o.answer), "words": o.words})
        for name, o in recipe.evals.problems.items()
    }
    kinds: tuple[tuple[Kind, dict[str, tuple[str, int, dict[str, Any]]]], ...] = (
        ("documents", documents),
        ("problems", problems),
    )
    return [
        load_samples(name, kind=kind, source=source, count=count, seed=recipe.evals.seed, options=options)
        for kind, table in kinds
        for name, (source, count, options) in table.items()
        if name in used
    ]


def check_tasks(recipe: Recipe) -> None:
    """Find every lm-eval task that some metric needs.

    Raises:
        InputError: a task that is unknown, or whose data is missing.
    """
    for name, task in recipe.evals.tasks.items():
        if name in used_data(recipe):
            check_task(task.source)


def scoring(recipe: Recipe, sets: Sequence[SampleSet]) -> dict[str, Any]:
    """Everything beside the checkpoint and the versions that its scores depend on, as plain data.

    Of an lm-eval task that is the content of its YAML, functions and local data, not their paths alone.
    """
    request = asdict(_request(recipe, sets, Path(), "source"))
    texts = [[found.name, found.kind, found.sha256] for found in sets]
    tasks = [{**task, "content": task_parts(check_task(task["source"]))} for task in request["tasks"]]
    return {**request, "checkpoint": "", "sets": [*map(_limits, request["sets"])], "tasks": tasks, "texts": texts}


def measure_source(recipe: Recipe, sets: Sequence[SampleSet], directory: Path, manifest: Manifest) -> Measured:
    """The source's scores and hidden states: from the cache where everything is equal, else measured and kept.

    Raises:
        CompressError: what the worker refused.
    """
    request = _request(recipe, sets, directory, "source")
    parts = {"manifest": manifest.digest, "scoring": scoring(recipe, sets), "environment": environment()}
    key = hashlib.sha256(canonical_json(parts)).hexdigest()
    kept = cache_directory() / "baselines" / key
    if is_whole(kept):
        say(f"the source was measured before with the same data, engine and versions: reusing {kept.name[:16]}")
        return read_measured(kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{key[:16]}.", dir=kept.parent) as folder:
        work = Path(folder) / "result"
        work.mkdir()
        _work(replace(request, output=str(work)), Path(folder))
        seal_results(work)
        shutil.rmtree(kept, ignore_errors=True)
        work.rename(kept)
    return read_measured(kept)


def measure_variant(
    recipe: Recipe, sets: Sequence[SampleSet], directory: Path, source: Measured, folder: Path
) -> Measured:
    """The variant's scores against the source's; `folder` is for the worker's files.

    Raises:
        CompressError: what the worker refused.
    """
    work = folder / "result"
    work.mkdir(parents=True)
    request = _request(recipe, sets, directory, "variant")
    metrics = [asdict(metric) for metric in metrics_of(recipe)]
    _work(replace(request, metrics=metrics, baseline=str(source.folder), output=str(work)), folder)
    return read_measured(work)


def seal_results(folder: Path) -> None:
    """Bind a folder of results by the hash of every file, so that a damaged one is never trusted."""
    write_json(folder / SEAL, build_manifest(folder).record())


def is_whole(folder: Path) -> bool:
    """Whether a folder of results is there and as it was when it was sealed."""
    if not (folder / SEAL).is_file():
        return False
    try:
        manifest = Manifest.from_record(parse_json((folder / SEAL).read_bytes()))
    except (ValueError, Refused):
        return False
    return [difference.path for difference in compare(manifest, folder)] == [SEAL]


def _request(recipe: Recipe, sets: Sequence[SampleSet], directory: Path, label: str) -> Request:
    return Request(
        checkpoint=str(directory),
        label=label,
        device=recipe.device,
        trust_remote_code=recipe.trust_remote_code,
        engine=recipe.evals.engine.model_dump(),
        sets=[{**asdict(found), **_set_options(recipe, found.name)} for found in sets],
        tasks=[_task_options(recipe, name) for name in recipe.evals.tasks if name in used_data(recipe)],
        alpha=recipe.gate.alpha,
        aa_samples=recipe.gate.aa_samples,
        metrics=[],
        baseline=None,
        output="",
    )


def _set_options(recipe: Recipe, name: str) -> dict[str, Any]:
    document = recipe.evals.documents.get(name)
    compared = {recipe.data_of(metric) for metric, options in recipe.gate.metrics.items() if options.kind == "kl"}
    return {"max_tokens": document.max_tokens if document else None, "compare": name in compared}


def _task_options(recipe: Recipe, name: str) -> dict[str, Any]:
    engine = recipe.evals.engine
    shared = {"name": name, "seed": recipe.evals.seed, "max_length": engine.max_length, "add_bos": engine.add_bos_token}
    return recipe.evals.tasks[name].model_dump() | shared


def used_data(recipe: Recipe) -> set[str]:
    """The sample sets and tasks that some metric is measured on."""
    return {recipe.data_of(metric) for metric in recipe.gate.metrics}


def _limits(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("samples", "whole")}


def _work(request: Request, folder: Path) -> None:
    """Run the worker; its progress goes to our standard error.

    Raises:
        CompressError: what the worker refused, or that it died.
    """
    file = folder / "request.json"
    request.write(file)
    code = _wait([sys.executable, "-m", "compress.worker", str(file)])
    if code == 0:
        return
    raise_error(Path(request.output))
    if code < 0:
        name = signal.Signals(-code).name
        raise CompressError(f"the evaluation of the {request.label} was killed by {name}: is there enough memory?")
    raise CompressError(f"the evaluation of the {request.label} crashed with exit code {code}: see above")


def _wait(command: list[str]) -> int:
    """Run a command to its end; whatever interrupts us, the process has ended when this returns or raises."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment_alone())
    try:
        return process.wait()
    finally:
        process.kill()  # nothing happens to one that has ended
        process.wait()


def read_measured(folder: Path) -> Measured:
    """What a worker has written."""
    found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    rows = {file.name.removesuffix(".jsonl"): read_rows(file) for file in sorted(folder.glob("*.jsonl"))}
    fields = {name: found[name] for name in ("aa", "tokenizer", "peak_bytes", "seconds")}
    return Measured(folder, rows, **fields, kv_cache=found.get("kv_cache"), tasks=found.get("tasks", {}))
