"""The distill stage: the weights of its input, trained towards a teacher, in the same shapes and dtypes.

Planned from headers like any stage, since training changes no shape. Both models are loaded as the evaluation loads
them, so a teacher may be quantized: a student of a released checkpoint learns what that checkpoint computes.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from compress.checkpoint import Checkpoint, quantization_block
from compress.errors import InputError, RecipeError, Refused
from compress.progress import Advance, say
from compress.ranks import processes, processes_here
from compress.source import fetch_source
from compress.stage_learn import Work, check_tokenizers, learn
from compress.stage_plan import LayerRow, Place, StagePlan, planned_tensors
from compress.stage_quantize import quantize_plan
from compress.stage_warm import check_blocks, warm_start
from compress.writer import ShardWriter, plan_shards
from distill.options import Distill
from quant.options import Quantize
from quant.plan import Assignment
from quant.stream import copy_tensor

__all__ = ["check_memory", "check_options", "plan_distill"]

TRAINED = 4 * 4  # bytes of a weight that is trained: itself, its gradient and two moments, float32


def plan_distill(options: Distill, source: Checkpoint, target: Path, place: Place) -> StagePlan:
    """Same tensors, other values.

    Raises:
        RecipeError: the student is quantized, or is the teacher itself, or an option that the two cannot have.
        Refused: the teacher has another tokenizer.
        InputError: no such teacher, or both do not fit into memory.
    """
    if quantization_block(source.config) is not None:
        raise RecipeError("stages: distill trains 16-bit weights, so it stands before quantize, not after it")
    teacher = place.origin if options.teacher == "source" else Checkpoint.open(fetch_source(options.teacher, say=say))
    if teacher is None or teacher.path == source.path:
        raise RecipeError("stages: the student is the teacher itself: put distill after prune, or name another teacher")
    if options.teacher != "source":
        _check_named_teacher(teacher, place)
    check_options(options, source, teacher)
    if options.warm_start is not None:
        check_blocks(source, teacher)
    memory = check_memory(source, teacher, together=options.top_k is None)
    rounded = _rounded(source, place) if options.quantized else []
    shards = plan_shards(source.specs, place.max_shard_size)

    def write(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        from quant.fake import plain_weights  # brings the model code

        journal = target.with_name(f"{target.name}.journal")
        start, warmed = source.path, dict[str, Any]()
        if options.warm_start is not None:
            start, warmed = warm_start(options.warm_start, (source, teacher), place, journal, device)
        student = partial(_student, start, rounded, device, trust_remote_code=place.trust_remote_code)
        found = learn(options, student, teacher, place, Work(journal, device, advance, source.nbytes))
        plain_weights(found.model)
        with ShardWriter(directory, shards) as writer:
            _write(source, _stored(found.model, source), writer)
        shutil.rmtree(journal)
        return found.report | warmed

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


def _student(
    path: Path, rounded: list[Assignment], device: torch.device, *, trust_remote_code: bool
) -> tuple[Any, Any]:
    """What is trained, under rounding where any is wanted, with its tokenizer."""
    from quant.fake import round_weights
    from quant.loader import load_model

    loaded = load_model(path, device=device, trust_remote_code=trust_remote_code)
    round_weights(loaded.model, rounded)
    return loaded.model, loaded.tokenizer


def _check_named_teacher(teacher: Checkpoint, place: Place) -> None:
    """Its tokenizer, before the stages in front are run; the student's is that of what the run starts from.

    Raises:
        Refused: another tokenizer.
    """
    from quant.loader import load_tokenizer  # a teacher that is the source needs no look

    assert place.origin is not None
    ours, theirs = (load_tokenizer(side.path, place.trust_remote_code) for side in (place.origin, teacher))
    check_tokenizers(ours, theirs)


def _rounded(source: Checkpoint, place: Place) -> list[Assignment]:
    """What the quantize stage that follows will round.

    Raises:
        RecipeError: none follows, or it chooses other codes than the nearest.
    """
    following = place.following
    if not isinstance(following, Quantize) or following.method != "rtn":
        raise RecipeError("stages: distill.quantized needs a stage quantize with method rtn right after it")
    return quantize_plan(following, source, place).quantized


def check_options(options: Distill, student: Checkpoint, teacher: Checkpoint) -> None:
    """Refuse more of the teacher's likeliest tokens than there are, and a batch that processes cannot share.

    Raises:
        RecipeError: top_k is above the vocabulary, or the batch no multiple of the processes.
    """
    batch, count = options.training.batch, processes()
    if batch % count:
        raise RecipeError(f"training.batch is {batch}, which {count} processes cannot share evenly: say a multiple")
    vocabulary = min(int(side.text_config["vocab_size"]) for side in (student, teacher))
    if options.top_k is not None and options.top_k > vocabulary:
        raise RecipeError(f"distill.top_k is {options.top_k}, but the vocabulary has {vocabulary} tokens: say fewer")


def check_memory(student: Checkpoint, teacher: Checkpoint, *, together: bool = True) -> int:
    """Bytes that training takes before activations; unless `together`, the teacher goes before the student learns.

    Raises:
        InputError: more than the memory that is largest here.
    """
    sizes = [sum(info.nbytes // info.dtype.itemsize for info in side.tensors.values()) for side in (student, teacher)]
    training, both = sizes[0] * TRAINED, (sizes[0] + sizes[1]) * 4
    needed = training + sizes[1] * 4 if together else max(training, both)
    present = psutil.virtual_memory().total // processes_here()  # each holds all of it, but for weights in shards
    if torch.cuda.is_available():
        present = max(present, torch.cuda.mem_get_info()[1])
    if needed > present:
        raise InputError(
            f"distilling {sizes[0] / 1e9:.1f} billion weights from {sizes[1] / 1e9:.1f} billion takes "
            f"{needed / 1e9:.1f} GB before activations, {present / 1e9:.1f} GB are here{_each()}: "
            + ("set distill.top_k, or use a smaller teacher" if together else "use a smaller teacher or student")
        )
    return needed


def _each() -> str:
    return f" for each of {processes_here()} processes" if processes_here() > 1 else ""


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
