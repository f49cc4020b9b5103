"""The distill stage: the weights of its input, trained towards a teacher, in the same shapes and dtypes.

Planned from headers like any stage, since training changes no shape. Both models are loaded as the evaluation loads
them, so a teacher may be quantized: a student of a released checkpoint learns what that checkpoint computes.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from compress.calibration import Text, training_texts
from compress.checkpoint import Checkpoint, quantization_block
from compress.errors import InputError, RecipeError, Refused
from compress.progress import Advance, say
from compress.source import fetch_source
from compress.stage_plan import LayerRow, Place, StagePlan, planned_tensors
from compress.stage_quantize import quantize_plan
from compress.writer import ShardWriter, plan_shards
from distill.data import Data, Source, TokenText, build_data
from distill.options import Distill, Mix
from quant.options import Quantize
from quant.plan import Assignment
from quant.stream import copy_tensor

__all__ = ["Learnt", "check_memory", "learn", "plan_distill"]

TRAINED = 4 * 4  # bytes of a weight that is trained: itself, its gradient and two moments, float32


@dataclass(frozen=True)
class Learnt:
    """What run.json keeps, the teacher as loaded, and the rows (N, T) that were held out."""

    report: dict[str, Any]
    teacher: Any
    held_out: Tensor


def plan_distill(options: Distill, source: Checkpoint, target: Path, place: Place) -> StagePlan:
    """Same tensors, other values.

    Raises:
        RecipeError: the student is quantized, or is the teacher itself.
        InputError: no such teacher, or both do not fit into memory.
    """
    if quantization_block(source.config) is not None:
        raise RecipeError("stages: distill trains 16-bit weights, so it stands before quantize, not after it")
    teacher = place.origin if options.teacher == "source" else Checkpoint.open(fetch_source(options.teacher, say=say))
    if teacher is None or teacher.path == source.path:
        raise RecipeError("stages: the student is the teacher itself: put distill after prune, or name another teacher")
    memory = check_memory(source, teacher)
    rounded = _rounded(source, place) if options.quantized else []
    shards = plan_shards(source.specs, place.max_shard_size)

    def write(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        from quant.fake import plain_weights, round_weights
        from quant.loader import load_model  # brings the model code

        code = place.trust_remote_code
        student = load_model(source.path, device=device, trust_remote_code=code)
        journal = target.with_name(f"{target.name}.journal")
        round_weights(student.model, rounded)
        found = learn(options, (student.model, student.tokenizer), teacher, place, (journal, device, advance))
        plain_weights(student.model)
        with ShardWriter(directory, shards) as writer:
            _write(source, _stored(student.model, source), writer)
        shutil.rmtree(journal)
        return found.report

    return StagePlan(
        name="distill",
        summary=f"distil from {options.teacher} ({options.training.steps} steps)",
        source=source,
        result=Checkpoint(target, source.config, planned_tensors(shards, target)),
        shards=shards,
        layers=[
            LayerRow(name.removesuffix(".weight"), (info.shape[0], info.shape[1]), "trained", "", *(info.nbytes,) * 2)
            for name, info in source.tensors.items()
            if len(info.shape) == 2
        ],
        write=write,
        memory=memory,
    )


def _rounded(source: Checkpoint, place: Place) -> list[Assignment]:
    """What the quantize stage that follows will round.

    Raises:
        RecipeError: none follows, or it chooses other codes than the nearest.
    """
    following = place.following
    if not isinstance(following, Quantize) or following.method != "rtn":
        raise RecipeError("stages: distill.quantized needs a stage quantize with method rtn right after it")
    return quantize_plan(following, source, place).quantized


def check_memory(student: Checkpoint, teacher: Checkpoint) -> int:
    """Bytes that training takes before activations.

    Raises:
        InputError: more than the memory that is largest here.
    """
    sizes = [sum(info.nbytes // info.dtype.itemsize for info in side.tensors.values()) for side in (student, teacher)]
    needed = sizes[0] * TRAINED + sizes[1] * 4
    present = psutil.virtual_memory().total
    if torch.cuda.is_available():
        present = max(present, torch.cuda.mem_get_info()[1])
    if needed > present:
        raise InputError(
            f"distilling {sizes[0] / 1e9:.1f} billion weights from {sizes[1] / 1e9:.1f} billion takes "
            f"{needed / 1e9:.0f} GB before activations, {present / 1e9:.0f} GB are here: use a smaller teacher or "
            "several GPUs"
        )
    return needed


def learn(
    options: Distill,
    student: tuple[Any, Any],
    teacher: Checkpoint,
    place: Place,
    where: tuple[Path, torch.device, Advance],
) -> Learnt:
    """Train a model (with its tokenizer) in place, to its best state.

    Args:
        where: the journal's folder, the device, and what is called with a total of the teacher's bytes.

    Raises:
        Refused: the teacher has another tokenizer, a model cannot be trained so, or the loss is no number.
        InputError: too little text.
    """
    from transformers.utils import logging

    from compress.tokenizer import tokenizer_parts
    from distill.loop import Stop, train
    from distill.state import read_best
    from quant.loader import load_model

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, tokenizer = student
    folder, device, advance = where
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    loaded = load_model(teacher.path, dtype=dtype, device=device, trust_remote_code=place.trust_remote_code)
    ours, theirs = (tokenizer_parts(found) if found else {} for found in (tokenizer, loaded.tokenizer))
    different = sorted(key for key in ours if ours[key] != theirs.get(key) and key != "chat template")
    if different or not ours:
        raise Refused(f"student and teacher differ in {', '.join(different) or 'tokenizers'}: their ids do not compare")
    data = _data(options, tokenizer, loaded.model, place, folder)
    training = options.training
    plan = (options.loss.build(), training.build(), Stop(options.evaluate_every, options.patience))
    started = time.monotonic()
    journal = folder / _stand(teacher)
    progress = train(model, loaded.model, data, plan, journal, _teller(training.steps, teacher.nbytes, advance))
    model.load_state_dict(read_best(journal))
    report = {
        "teacher": str(options.teacher),
        "loss": options.loss.model_dump(),
        "tokens": data.train[data.order[: progress.step * training.batch]].tokens,
        "held_out_tokens": data.held_out.tokens,
        "seconds": round(time.monotonic() - started, 1),
        "best": progress.best,
        "curve": _curve(progress.curve, progress.losses),
    }
    return Learnt(report, loaded.model, data.held_out.ids)


def _data(options: Distill, tokenizer: Any, teacher: Any, place: Place, folder: Path) -> Data:
    training = options.training
    size = {"length": training.length, "held_out": options.held_out, "total": training.steps * training.batch}
    if not isinstance(options.data, Mix):
        from distill.sampling import sampled_texts

        texts = sampled_texts(teacher, tokenizer, options.sampled, training.length, training.seed, folder)
        return build_data([Source("self", 1.0, texts)], seed=training.seed, **size)
    weights = {**options.data.documents, **options.data.problems}
    found = training_texts([*options.data.documents], [*options.data.problems], place.evaluated, tokenizer)
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


def _teller(steps: int, nbytes: int, advance: Advance) -> Callable[[Any, int], None]:
    """Moves the bar, and says at each evaluation where things are."""
    started = time.monotonic()
    done = tokens = looks = 0

    def tell(progress: Any, learnt: int) -> None:
        nonlocal done, tokens, looks
        done, tokens = done + 1, tokens + learnt
        advance(nbytes // steps)
        if len(progress.curve) == looks:
            return
        looks = len(progress.curve)
        seconds = time.monotonic() - started
        left = seconds / done * (steps - progress.step)
        say(
            f"step {progress.step} of {steps}: loss {progress.losses[-1]:.4f}, held-out KL "
            f"{progress.curve[-1]['kl']:.4f} (best {progress.best['kl']:.4f}), {tokens / seconds:.0f} tokens/s, "
            f"{left / 60:.1f} min left"
        )

    return tell


def _curve(curve: list[dict[str, float]], losses: list[float]) -> list[dict[str, float]]:
    """Each evaluation with the mean loss of the updates since the one before, none for the first."""
    ends = [int(entry["step"]) for entry in curve]
    parts = [losses[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [
        {"step": end, "kl": entry["kl"], **({"loss": sum(part) / len(part)} if part else {})}
        for end, entry, part in zip(ends, curve, parts, strict=True)
    ]


def _stored(model: Any, source: Checkpoint) -> dict[str, Tensor]:
    """The model's weights by their names in the checkpoint.

    Raises:
        Refused: a weight that the checkpoint does not have, which would be lost.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tensors: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    if source.tied:
        tensors.pop("lm_head.weight", None)
    lost = sorted(set(tensors) - set(source.tensors))
    if lost:
        raise Refused(f"{len(lost)} trained weights have no place in the checkpoint, first {lost[0]!r}")
    return tensors


def _write(source: Checkpoint, tensors: dict[str, Tensor], writer: ShardWriter) -> None:
    """Every tensor of the checkpoint: the trained ones, and as they are those that the model does not use."""
    for name, info in source.tensors.items():
        if name not in tensors:
            copy_tensor(name, info, info.dtype, writer, lambda _: None)
            continue
        tensor = tensors[name].to(info.dtype)
        if not bool(tensor.isfinite().all()):
            raise Refused(f"the trained weight {name!r} is not finite in {info.dtype}: lower training.learning_rate")
        writer.append(name, tensor)
