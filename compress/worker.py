"""One side, measured in a process of its own: `python -m compress.worker REQUEST.json`.

It loads the files as they are on disk, scores every sample set, and writes rows as it goes. Nothing is shared with the
process that made the files, so what is measured is what ships. An error of the user's is written as `error.json` for
the parent to raise; anything else is a crash with a traceback.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from compress import errors
from compress.device import resolve_device
from compress.errors import CompressError
from compress.head import load_head, read_head, save_head
from compress.memory import peak_resident_bytes
from compress.progress import say, step
from compress.request import Request, leave_error, read_rows, write_rows
from compress.tokenizer import tokenizer_parts
from evals.gate import Metric, next_look
from evals.samples import Sample, SampleSet
from evals.score import Reading, Reference, Row, aa_difference, score
from evals.tasks import TaskOptions, TaskScores, run_task
from evals.windows import Encoded, encode, total_tokens
from quant.loader import load_model

__all__ = ["main"]


def main(path: str) -> int:
    """Carry out a request; the exit code is that of the error, 0 without one."""
    request = Request.read(Path(path))
    try:
        _measure(request, Path(request.output))
    except CompressError as error:
        leave_error(Path(request.output), error)
        return error.exit_code
    return 0


def _measure(request: Request, output: Path) -> None:
    start = time.monotonic()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = load_model(
        Path(request.checkpoint),
        dtype=getattr(torch, request.engine["dtype"]),
        device=resolve_device(request.device),
        trust_remote_code=request.trust_remote_code,
        attn_implementation=request.engine["attention"],
    )
    if loaded.tokenizer is None:
        raise errors.CheckpointError(f"{request.checkpoint} has no tokenizer: copy it from the original model")
    reading = Reading(request.engine["batch_tokens"], loaded.kv.make_cache if loaded.kv else None)
    differences = {}
    for entry in request.sets:
        encoded = _encode(loaded.tokenizer, entry, request.engine)
        rows = _score_set(request, loaded.model, reading, entry, encoded)
        write_rows(output / f"{entry['name']}.jsonl", rows)
        if request.aa_samples and request.baseline is None:
            again = aa_difference(loaded.model, encoded, rows, count=request.aa_samples, reading=reading)
            differences[entry["name"]] = again
    tasks = {}
    for task in request.tasks:
        scores = _run_task(request, loaded.model, loaded.tokenizer, task)
        write_rows(output / f"{task['name']}.jsonl", scores.rows)
        tasks[task["name"]] = scores.what
    if request.baseline is None:
        save_head(read_head(loaded.model), output / "head.safetensors")
    found = {
        "tokenizer": tokenizer_parts(loaded.tokenizer),
        "formats": dict(loaded.formats),
        "kv_cache": loaded.kv.record() if loaded.kv and request.sets else None,
        "aa": differences,
        "tasks": tasks,
        "peak_bytes": peak_resident_bytes(),
        "seconds": round(time.monotonic() - start, 2),
    }
    (output / "result.json").write_text(json.dumps(found), encoding="utf-8")


def _run_task(
    request: Request, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Mapping[str, Any]
) -> TaskScores:
    """One lm-eval task."""
    options = {key: value for key, value in task.items() if key != "name"}
    with step(f"{task['name']}, {request.label}", task["count"]) as advance:
        found = run_task(
            model, tokenizer, TaskOptions(**options), folder=Path(request.output) / "tasks", advance=advance
        )
    for note in found.notes:
        say(f"{task['name']}: {note}")
    return found


def _encode(tokenizer: PreTrainedTokenizerBase, entry: Mapping[str, Any], engine: Mapping[str, Any]) -> list[Encoded]:
    samples = tuple(Sample(**sample) for sample in entry["samples"])
    found = SampleSet(entry["name"], entry["kind"], entry["source"], entry["sha256"], samples)
    return encode(
        tokenizer,
        found,
        max_length=engine["max_length"],
        max_tokens=entry["max_tokens"],
        add_bos=engine["add_bos_token"],
    )


def _score_set(
    request: Request, model: PreTrainedModel, reading: Reading, entry: Mapping[str, Any], encoded: Sequence[Encoded]
) -> list[Row]:
    """The rows of one set: all of them, or as many as the looks of its metrics ask for."""
    name = entry["name"]
    with step(f"scoring {name}, {request.label}", total_tokens(list(encoded))) as advance:
        if request.baseline is None:
            found = score(model, encoded, reading=reading, keep_states=entry["compare"], advance=advance)
            if found.states is not None:
                save_file({"states": found.states}, Path(request.output) / f"{name}.states.safetensors")
            return found.rows
        reference = _reference(Path(request.baseline), name, model.device) if entry["compare"] else None
        baseline_rows = read_rows(Path(request.baseline) / f"{name}.jsonl")
        metrics = [Metric(**{**m, "looks": tuple(m["looks"])}) for m in request.metrics if m["data"] == name]
        aa = json.loads((Path(request.baseline) / "result.json").read_text(encoding="utf-8"))["aa"].get(name)
        wanted = partial(_until, metrics, baseline_rows, alpha=request.alpha, aa_difference=aa)
        rows: list[Row] = []
        while (until := wanted(rows)) > len(rows):
            part = reference and _part(reference, baseline_rows, len(rows), until)
            rows += score(model, encoded[len(rows) : until], reading=reading, reference=part, advance=advance).rows
    return rows


def _until(
    metrics: Sequence[Metric],
    baseline: Sequence[Row],
    rows: Sequence[Row],
    *,
    alpha: float,
    aa_difference: float | None,
) -> int:
    """How many samples are wanted in all, given those so far, by the same rule that will judge them."""
    if not any(metric.looks for metric in metrics):
        return len(baseline)
    return max(next_look(metric, baseline, rows, alpha=alpha, aa_difference=aa_difference) or 0 for metric in metrics)


def _reference(folder: Path, name: str, device: torch.device) -> Reference:
    states = load_file(folder / f"{name}.states.safetensors")["states"]
    head = load_head(folder / "head.safetensors", device=device)
    return Reference(states, head, tuple(row["hash"] for row in read_rows(folder / f"{name}.jsonl")))


def _part(reference: Reference, rows: Sequence[Row], start: int, stop: int) -> Reference:
    """The reference of samples [start, stop)."""
    before, within = (sum(row["tokens"] for row in part) for part in (rows[:start], rows[start:stop]))
    return Reference(reference.states[before : before + within], reference.head, reference.hashes[start:stop])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
