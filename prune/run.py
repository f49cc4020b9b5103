"""Pruning a checkpoint: layers first, then experts and widths block by block, then the planned shards.

Dropping layers only changes which tensors are read, so the walk runs on the shorter model at once; beside it runs the
whole model, towards whose stream the blocks from the first gap on are refitted (`prune.propagate`). Every finished
block goes to the journal; a killed run restores those and goes on. When all are there, the shards are written from the
journal and, for what was not changed, from the source.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.architectures import layer_of
from compress.checkpoint import Checkpoint
from compress.errors import Refused
from compress.progress import Advance, say
from compress.tensor_file import read_tensor
from compress.walk import Block, Whole, walk
from compress.walk_journal import Journal
from compress.walk_model import skeleton
from compress.writer import ShardWriter
from prune.depth import TOKENS, choose_layers
from prune.dims import by_expert, expert_of
from prune.experts import drop_experts, prune_experts
from prune.plan import PrunePlan, drop_layers
from prune.propagate import DROPPED, STRENGTH, spans_of
from prune.widths import Cut, prune_widths, readers_of, restore_widths, slice_block

__all__ = ["How", "digest", "run_prune"]


@dataclass(frozen=True)
class How:
    """How to choose what goes.

    method             "obs", "activation" or "random"
    layer_score        "kl" or "cosine"
    tokens             (N, T) int64 calibration tokens
    journal            a folder for finished blocks, kept if the run is killed, and for the order in which layers go
    trust_remote_code  run Python code that the checkpoint brings
    """

    method: str
    layer_score: str
    tokens: Tensor
    journal: Path
    trust_remote_code: bool = False


def run_prune(plan: PrunePlan, how: How, directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
    """Write the planned shards into `directory`; what was kept, as plain data.

    Args:
        advance: called with source bytes as they are done.

    Raises:
        InputError: no calibration tokens, or an activation that is not finite.
        Refused: a weight that is not finite, or a block that cannot be pruned.
    """
    journal = Journal(how.journal / digest(plan.checkpoint, how, how.tokens, dict(plan.after)), writes=True)
    kept = [*range(plan.before["layers"])]
    if plan.cut("layers"):
        score = how.layer_score if how.method != "random" else "random"
        first = how.tokens[: max(1, TOKENS // how.tokens.shape[1])]
        order = Journal(how.journal / digest(plan.checkpoint, how, first), writes=True)
        model = skeleton(plan.checkpoint, trust_remote_code=how.trust_remote_code)
        kept = choose_layers(model, first, plan.after["layers"], score, order, device)
    view = drop_layers(plan.checkpoint, kept)
    whole = _beside(plan, kept, how)
    blocks = []
    if whole or any(plan.cut(axis) for axis in ("ffn", "heads", "kv_groups", "experts")):
        for index, report in enumerate(_walk(plan, view, whole, how, journal, device)):
            blocks.append(report)
            advance(sum(info.nbytes for name, info in view.tensors.items() if layer_of(name) == index))
    if whole and not any(report["propagated"] for report in blocks):
        say("nothing is refitted towards the whole model: no linear down_proj ends a block without a norm behind it")
    _write(plan, view, journal, blocks, directory)
    shutil.rmtree(journal.directory, ignore_errors=True)
    counts = [{**block, "kept": {name: len(listed) for name, listed in block["kept"].items()}} for block in blocks]
    return {"method": how.method, "layers": kept, "calibration_tokens": how.tokens.numel(), "blocks": counts}


def _beside(plan: PrunePlan, kept: Sequence[int], how: How) -> Whole | None:
    """The model as it was, for a refit that aims at it."""
    return Whole(plan.checkpoint, spans_of(kept, plan.before["layers"])) if plan.propagates(how.method) else None


def _walk(
    plan: PrunePlan, view: Checkpoint, whole: Whole | None, how: How, journal: Journal, device: torch.device
) -> Iterator[dict[str, Any]]:
    cuts = readers_of(plan.before, plan.after)
    for block in walk(
        view, how.tokens, device=device, reference=whole or False, trust_remote_code=how.trust_remote_code
    ):
        saved = journal.load(block.name)
        fresh: dict[str, Any] = {"name": block.name, "kept": {}, "propagated": [], "experts": []}
        report = fresh if saved is None else saved[1]
        if plan.cut("experts"):
            if saved is None:
                report["experts"] = prune_experts(block, plan.after["experts"], how.method)
            else:
                drop_experts(block, report["experts"])
        if saved is None:
            mine, strength = _task(block, cuts, whole)
            if mine:
                pruned = prune_widths(block, mine, how.method, plan.before, strength)
                report["kept"], report["propagated"] = pruned.kept, pruned.propagated
            journal.save(block.name, slice_block(block, report["kept"], plan.before), report)
        else:
            restore_widths(block, saved[0], report["kept"])
        yield report


def _task(block: Block, cuts: Mapping[str, list[Cut]], whole: Whole | None) -> tuple[Mapping[str, list[Cut]], float]:
    """What to cut or, from the first dropped layer on, only to refit in a block; and the share of the gap to close."""
    span = whole.spans[block.index] if whole else (block.index,)
    refits = span[-1] > block.index
    return {**cuts, "down_proj": cuts.get("down_proj", [])} if refits else cuts, DROPPED if len(span) > 1 else STRENGTH


def _write(
    plan: PrunePlan, view: Checkpoint, journal: Journal, blocks: Sequence[dict[str, Any]], directory: Path
) -> None:
    """The planned shards: what the journal holds, and the rest as it is in the source without its dropped experts."""
    kept = {i: block["experts"] for i, block in enumerate(blocks) if block["experts"]}
    with ShardWriter(directory, plan.shards) as writer:
        done: set[str] = set()
        for block in blocks:
            for name, tensor in journal.tensors(block["name"]):
                _append(writer, plan, name, tensor)
                done.add(name)
        for name in view.tensors:
            new, rows = _renamed(name, kept)
            if name not in done and new is not None:
                tensor = read_tensor(view.tensors[name])
                _append(writer, plan, new, tensor if rows is None else tensor[rows])


def _renamed(name: str, kept: Mapping[int, list[int]]) -> tuple[str | None, list[int] | None]:
    """A tensor's name in the result (None: it is dropped), and which entries stay of one with an entry per expert."""
    listed, expert = kept.get(-1 if (layer := layer_of(name)) is None else layer), expert_of(name)
    if listed is None:
        return name, None
    if expert is not None:
        new = name.replace(f".experts.{expert}.", f".experts.{listed.index(expert)}.") if expert in listed else None
        return new, None
    return name, listed if by_expert(name) else None


def _append(writer: ShardWriter, plan: PrunePlan, name: str, tensor: Tensor) -> None:
    tensor = tensor.to(plan.outputs[name].dtype)
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise Refused(f"tensor {name!r} holds NaN or infinite values: the source checkpoint is damaged")
    writer.append(name, tensor.contiguous())


def digest(checkpoint: Checkpoint, how: How, tokens: Tensor, *more: object) -> str:
    """Names what results depend on: the source, the method, tokens, and whatever else."""
    seen = hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()
    stand = [(str(info.path), info.path.stat().st_mtime_ns) for info in checkpoint.tensors.values()]
    whole = [how.method, how.layer_score, seen, list(tokens.shape), *more, stand]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]
