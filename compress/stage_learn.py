"""Training inside a stage: texts become rows, the teacher is loaded or asked, the student ends in its best state.

Shared by the stages that train: `distill` and `draft`.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calibration import Text, training_texts
from compress.checkpoint import Checkpoint
from compress.errors import InputError, Refused
from compress.progress import Advance, say, step, watched
from compress.ranks import helped
from compress.stage_plan import Place
from distill.data import Data, Source, TokenText, build_data
from distill.options import Distill, Mix

__all__ = ["Learnt", "MakeStudent", "Work", "check_tokenizers", "learn", "load_teacher"]

MakeStudent = Callable[[], tuple[Any, Any]]  # a model with its tokenizer; can be pickled


@dataclass(frozen=True)
class Work:
    """Where training keeps its state, where it computes, and what is called with a total of `nbytes` as it goes on."""

    folder: Path
    device: torch.device
    advance: Advance
    nbytes: int


@dataclass(frozen=True)
class Learnt:
    """The student in its best state with its tokenizer, what run.json keeps, and the rows (N, T) that were held out."""

    model: Any
    tokenizer: Any
    report: dict[str, Any]
    held_out: Tensor


def learn(options: Distill, student: MakeStudent, teacher: Checkpoint, place: Place, work: Work) -> Learnt:
    """Train a student to its best state, in all processes of the run.

    Raises:
        Refused: the teacher has another tokenizer, a model cannot be trained so, or the loss is no number.
        InputError: too little text.
    """
    from transformers.utils import logging

    from distill.loop import Stop, train

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load = partial(load_teacher, teacher.path, work.device, trust_remote_code=place.trust_remote_code)
    model, tokenizer = student()
    loaded = load()
    check_tokenizers(tokenizer, loaded.tokenizer)
    stand = _stand(teacher)
    data = _data(options, tokenizer, loaded.model, place, work.folder)
    listened = loaded.model
    if options.top_k is not None:
        data = _asked(options, data, (loaded.model, stand), model, work.folder)
        listened = loaded = None
    training = options.training
    plan = (options.loss.build(), training.build(), Stop(options.evaluate_every, options.patience))
    rest = (data, plan, work.folder / stand)
    others = partial(_load, student, load if listened is not None else None, rest)
    started = time.monotonic()
    with helped(others, work.folder, work.device), watched("training", training.steps) as show:
        progress = train(model, listened, *rest, _teller(training.steps, work, show))
    model = _best(model, student, work.folder / stand)
    report = _report(options, data, progress) | {"seconds": round(time.monotonic() - started, 1)}
    return Learnt(model, tokenizer, report, data.held_out.ids)


def _report(options: Distill, data: Data, progress: Any) -> dict[str, Any]:
    return {
        "teacher": str(options.teacher),
        "loss": options.loss.model_dump(),
        "tokens": data.train[data.order[: progress.step * options.training.batch]].tokens,
        "held_out_tokens": data.held_out.tokens,
        "best": progress.best,
        **({"top_k": options.top_k} if options.top_k else {}),
        "curve": _curve(progress.curve, progress.losses),
    }


def _load(student: MakeStudent, teacher: Callable[[], Any] | None, rest: tuple[Any, ...]) -> Callable[[], object]:
    """What another process does: load the same models, then train with the first."""
    from transformers.utils import logging

    from distill.loop import train

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return partial(train, student()[0], teacher().model if teacher else None, *rest)


def _best(model: Any, student: MakeStudent, journal: Path) -> Any:
    """The model with the best weights: the trained one, or where its weights are in shards a whole one."""
    from torch.distributed.tensor import DTensor  # slow

    from distill.state import read_best

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model, _ = student()
    model.load_state_dict(read_best(journal))
    return model


def load_teacher(path: Path, device: torch.device, *, trust_remote_code: bool) -> Any:
    """A model with its tokenizer, in the dtype in which teachers compute."""
    from quant.loader import load_model

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return load_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)


def check_tokenizers(student: Any, teacher: Any) -> None:
    """Refuse two that give other ids, None included.

    Raises:
        Refused: they differ in more than their chat template.
    """
    from compress.tokenizer import tokenizer_parts

    ours, theirs = (tokenizer_parts(found) if found else {} for found in (student, teacher))
    different = sorted(key for key in ours if ours[key] != theirs.get(key) and key != "chat template")
    if different or not ours:
        raise Refused(f"student and teacher differ in {', '.join(different) or 'tokenizers'}: their ids do not compare")


def _asked(options: Distill, data: Data, teacher: tuple[Any, str], student: Any, folder: Path) -> Data:
    """The rows with what the teacher (and the hash of its files) says of them; held out, as it is at temperature 1."""
    from distill.pair import Teacher
    from distill.record import Asked, record

    model, stand = teacher
    assert options.top_k is not None
    vocabulary = min(int(side.config.get_text_config().vocab_size) for side in (model, student))
    asked = Asked(stand, options.top_k, vocabulary)
    warm = replace(asked, temperature=options.loss.temperature)
    with step("asking the teacher", len(data.train.ids) + len(data.held_out.ids)) as advance:
        train = record(Teacher(model), data.train, warm, folder, advance)
        held_out = record(Teacher(model), data.held_out, asked, folder, advance)
    return replace(data, train=train, held_out=held_out)


def _data(options: Distill, tokenizer: Any, teacher: Any, place: Place, folder: Path) -> Data:
    training = options.training
    size = {"length": training.length, "held_out": options.held_out, "total": training.steps * training.batch}
    if not isinstance(options.data, Mix):
        from distill.sampling import sampled_texts

        texts = sampled_texts(teacher, tokenizer, options.sampled, training.length, training.seed, folder)
        return build_data([Source("self", 1.0, texts)], seed=training.seed, **size)
    weights = {**options.data.documents, **options.data.problems}
    found = training_texts([*options.data.documents], [*options.data.problems], place.evaluated, tokenizer)
    for name, left in found.items():
        if not left:
            raise InputError(f"every text of {name!r} is evaluated, none is left to learn from: evaluate fewer of them")
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    sources = [
        Source(name, weights[name], (_tokens(text, tokenizer, ends) for text in texts)) for name, texts in found.items()
    ]
    return build_data(sources, seed=training.seed, **size)


def _tokens(text: Text, tokenizer: Any, ends: list[int]) -> TokenText:
    given, learnt = (
        tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] if part else []
        for part in (text.given, text.learnt)
    )
    return TokenText([*given, *learnt, *ends], given=len(given))


def _stand(teacher: Checkpoint) -> str:
    """Names the bytes that are learnt from: their places and times."""
    files = sorted({str(info.path) for info in teacher.tensors.values()})
    stand = [(file, Path(file).stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(stand).encode()).hexdigest()[:16]


def _teller(steps: int, work: Work, show: Callable[[int, str], None]) -> Callable[[Any, int], None]:
    """Moves the bars, and says at each evaluation where things are."""
    started = time.monotonic()
    done = tokens = looks = 0

    def tell(progress: Any, learnt: int) -> None:
        nonlocal done, tokens, looks
        done, tokens = done + 1, tokens + learnt
        seconds = time.monotonic() - started
        figures = f"{tokens / seconds:,.0f} tokens/s, loss {progress.losses[-1]:.4f}, held-out KL {_kl(progress)}"
        work.advance(work.nbytes // steps)
        show(progress.step, figures)
        if len(progress.curve) > looks:
            looks = len(progress.curve)
            left = seconds / done * (steps - progress.step) / 60
            say(f"step {progress.step} of {steps}: {figures}, {left:.1f} min left")

    return tell


def _kl(progress: Any) -> str:
    last, best = progress.curve[-1]["kl"], progress.best["kl"]
    return f"{last:.4f}" if last == best else f"{last:.4f} (best {best:.4f})"


def _curve(curve: list[dict[str, float]], losses: list[float]) -> list[dict[str, float]]:
    """Each evaluation with the mean loss of the updates since the one before, none for the first."""
    ends = [int(entry["step"]) for entry in curve]
    parts = [losses[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [
        {"step": end, "kl": entry["kl"], **({"loss": sum(part) / len(part)} if part else {})}
        for end, entry, part in zip(ends, curve, parts, strict=True)
    ]
