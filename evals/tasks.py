"""lm-eval tasks on a model that is already loaded, as one row per document.

The harness builds the prompts, runs the model and applies the task's filter and metric; this module shuts the doors
through which it would go wrong in silence:

- none of its caches is used: one does not know the model, the other not the data;
- documents are a seeded permutation cut to `count`, passed as sorted distinct numbers (others are logged under wrong
  ones), and every row carries a hash of its document, prompt and target;
- softmax and sums are float32; a likelihood that is not finite is refused, where the harness would choose answer 0;
- a prompt that does not fit is refused, where the harness would cut it on the left;
- wrapping a model re-ties its embeddings, which overwrites a head of its own: refused as well.

Whether a generation hit its limit of tokens is judged by encoding its text again, since the harness keeps no tokens:
from 95% of the limit on it counts as capped.

Only metrics of which more is better are scored, and a task must say so. The harness shows a bar of its own while it
builds prompts; TQDM_DISABLE=1 in the environment of the process keeps it away.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress.errors import InputError, Refused
from compress.inputs import HUB_ID
from evals.task_files import LOCAL, TaskFile, check_task, write_bound

__all__ = ["TaskOptions", "TaskScores", "run_task"]

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskOptions:
    """Which figure of which task, on which documents, and how the harness is to compute it.

    source           name of a task of lm-eval, or path of a YAML file
    count, seed      the first `count` documents (None: all) in the order of sha256("seed:id")
    metric, filter   the figure that is scored, as the task names them
    num_fewshot      None: as the task says
    max_new_tokens   None: as the task says
    batch_size       requests per batch
    add_bos          BOS before each prompt; None: as the tokenizer does
    include          folders with YAML files of tasks, searched by name before lm-eval's own
    """

    source: str
    count: int | None = None
    seed: int = 0
    metric: str = "acc"
    filter: str = "none"
    num_fewshot: int | None = None
    chat_template: bool = False
    max_new_tokens: int | None = None
    max_length: int = 2048
    batch_size: int = 8
    add_bos: bool | None = None
    include: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskScores:
    """Rows in the order of the looks: id, hash, score, gen_capped (None without generation), text (or None).

    `figures` are the task's own results over these documents, "metric,filter" -> mean; `notes` are warnings; `what`
    names the task, all documents it has, its data set on the hub ("" for local data), the figure, and the shots.
    """

    rows: list[Row]
    figures: dict[str, float]
    notes: tuple[str, ...]
    what: dict[str, Any]


def run_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: TaskOptions,
    *,
    folder: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> TaskScores:
    """Score the documents; `folder` keeps copies of local data, `advance` is told documents as they are done.

    Raises InputError for a task, metric, filter or package that is not there, Refused for evidence that would be wrong.
    """
    found = check_task(options.source, include=options.include)
    _check_filter(found.name, found.config, options.filter)
    path = write_bound(found, folder, num_fewshot=options.num_fewshot)
    with _quiet(), _translated(found.name):
        from lm_eval.tasks import TaskManager  # lm-eval takes seconds to import, and most runs do not need it

        from evals.task_model import WatchedModel

        manager = TaskManager(include_defaults=False)
        task = manager.load([str(path)])["tasks"][found.name]
        _check_metric(found.name, task.higher_is_better(), options.metric)
        numbers = _chosen(found.name, len(task.eval_docs), options)
        lm = WatchedModel(
            model,
            tokenizer,
            max_length=options.max_length,
            batch_size=options.batch_size,
            add_bos=options.add_bos,
            advance=lambda part: advance(round(part * len(numbers))),
        )
        results = _evaluate(lm, task, numbers, options, manager)
    samples = _by_document(found.name, results["samples"][found.name], numbers, options.filter)
    rows = [_row(found.name, samples[number], lm, options.metric) for number in numbers]
    figures, notes = _figures(results["results"][found.name]), _notes(found.name, found.config, task)
    return TaskScores(rows, figures, notes, _what(found, task, options))


def _chosen(name: str, size: int, options: TaskOptions) -> list[int]:
    """Numbers of documents in the order of the looks."""
    if options.count is not None and not 1 <= options.count <= size:
        raise InputError(f"task {name!r} has {size} documents, count {options.count} must be between 1 and that")
    order = sorted(range(size), key=lambda i: hashlib.sha256(f"{options.seed}:{name}/{i}".encode()).digest())
    if not order:
        raise Refused(f"task {name!r} has no documents, so nothing can be measured on it")
    return order[: options.count]


def _evaluate(lm: Any, task: Any, numbers: Sequence[int], options: TaskOptions, manager: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    if getattr(task, "UNSAFE_CODE", False):
        raise Refused(f"task {task.task_name!r} runs code written by the model, which is not done here")
    limit = {"max_gen_toks": options.max_new_tokens} if options.max_new_tokens else None
    found: dict[str, Any] = simple_evaluate(
        model=lm,
        tasks=[task],
        samples={task.task_name: sorted(numbers)},
        task_manager=manager,  # without one the harness reads its 13,000 YAML files
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=options.chat_template,
        gen_kwargs=limit,
    )
    return found


def _check_filter(name: str, config: Mapping[str, Any], wanted: str) -> None:
    filters = [entry["name"] for entry in config.get("filter_list") or [{"name": "none"}]]
    if wanted not in filters:
        raise InputError(f"task {name!r} has no filter {wanted!r}, use {' or '.join(filters)}")


def _check_metric(name: str, better: Mapping[str, Any], wanted: str) -> None:
    if wanted not in better:
        raise InputError(f"task {name!r} has no metric {wanted!r}, use {' or '.join(sorted(better))}")
    if better[wanted] is not True:
        raise InputError(f"task {name!r} does not say that a higher {wanted!r} is better, so it is no accuracy")


def _by_document(
    name: str, samples: Sequence[Mapping[str, Any]], numbers: Sequence[int], wanted: str
) -> dict[int, Mapping[str, Any]]:
    """What the harness logged for the filter, by number of the document; all must be there, once."""
    chosen = [sample for sample in samples if sample["filter"] == wanted]
    if sorted(sample["doc_id"] for sample in chosen) != sorted(numbers):
        raise Refused(f"task {name!r} scored {len(chosen)} documents, not the {len(numbers)} asked for")
    return {sample["doc_id"]: sample for sample in chosen}


def _row(name: str, sample: Mapping[str, Any], lm: Any, metric: str) -> Row:
    score = sample[metric]
    if isinstance(score, tuple | list | str):
        raise InputError(f"metric {metric!r} of task {name!r} is no number per document, choose another")
    text = sample["resps"][0][0]
    generated = isinstance(text, str)
    hashes = "".join(sample[part] for part in ("doc_hash", "prompt_hash", "target_hash"))
    return {
        "id": f"{name}/{sample['doc_id']}",
        "hash": hashlib.sha256(hashes.encode()).hexdigest(),
        "score": float(score),
        "gen_capped": lm.is_capped(text, sample["arguments"][0][1]) if generated else None,
        "text": text if generated else None,
    }


def _figures(results: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in results.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if "," in name and "_stderr" not in name}


def _notes(name: str, config: Mapping[str, Any], task: Any) -> tuple[str, ...]:
    sampler = (config.get("fewshot_config") or {}).get("sampler")
    if not task.get_config("num_fewshot") or sampler == "first_n":
        return ()
    return (
        f"task {name!r} draws its {task.get_config('num_fewshot')} examples per document depending on which documents "
        "run, so figures with another count are about other prompts: set fewshot_config.sampler to first_n",
    )


def _what(found: TaskFile, task: Any, options: TaskOptions) -> dict[str, Any]:
    """Plain data: what a figure of this task is a figure of."""
    config = found.config
    path = str(config.get("dataset_path") or "")
    return {
        "task": found.name,
        "documents": len(task.eval_docs),
        "dataset": path if HUB_ID.fullmatch(path) and path not in LOCAL and not Path(path).exists() else "",
        "config": config.get("dataset_name"),
        "split": config.get("test_split") or config.get("validation_split"),
        "metric": options.metric,
        "filter": options.filter,
        "num_fewshot": task.get_config("num_fewshot"),
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness's warnings, and the bars of `datasets`, off the terminal."""
    import datasets

    logger, hidden = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not hidden:
            datasets.enable_progress_bars()


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """What the harness raises for a user's mistake, as ours."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except ImportError as error:
        raise InputError(f"task {name!r} needs a package that is not installed: {error}") from error
    except (OSError, DatasetsError) as error:
        raise InputError(f"cannot get the data of task {name!r}: {error}") from error
