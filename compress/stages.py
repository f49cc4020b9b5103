"""Stages: each from a checkpoint directory to a checkpoint directory, planned from headers before it runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from compress.checkpoint import Checkpoint
from compress.modules import Module
from compress.recipe import Stage
from compress.tensor_file import TensorInfo, encode_header
from compress.writer import ShardPlan, copy_side_file, write_json
from quant.options import Quantize
from quant.plan import Choice, QuantizePlan, plan_quantize, stored_specs
from quant.stream import run_streaming

__all__ = ["LayerRow", "StagePlan", "plan_stages", "run_stage"]

Advance = Callable[[int], None]


@dataclass(frozen=True)
class LayerRow:
    """What one module becomes."""

    module: Module
    becomes: str  # a format's name, or "16 bits"
    reason: str  # why it is left alone, "" if it is not
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class StagePlan:
    """A stage that is ready to run.

    source   what it reads: a real checkpoint, or for later stages the one the stage before will write
    result   what it will write, down to the offsets; its files do not exist yet
    write    fills the shards into a directory
    """

    name: str
    summary: str
    source: Checkpoint
    result: Checkpoint
    shards: ShardPlan
    layers: list[LayerRow]
    write: Callable[[Path, torch.device, Advance], None]


def plan_stages(stages: Sequence[Stage], source: Checkpoint, directory: Path, max_shard_size: int) -> list[StagePlan]:
    """Plan every stage on what the one before it will write; `directory` will hold one folder per stage.

    Raises:
        InputError: what any stage refuses.
    """
    plans: list[StagePlan] = []
    for i, stage in enumerate(stages):
        plans.append(_plan_quantize(stage.quantize, source, directory / f"{i}-{stage.name}", max_shard_size))
        source = plans[-1].result
    return plans


def run_stage(plan: StagePlan, device: torch.device, advance: Advance) -> None:
    """Write the stage's directory: shards, config.json and side files, all of it or nothing.

    A later stage's source is where the stage before has written it by now, at the planned offsets.

    Args:
        advance: called with source bytes as they are done.
    """
    target = plan.result.path
    partial = target.with_name(f"{target.name}.partial")
    partial.mkdir(parents=True)
    plan.write(partial, device, advance)
    write_json(partial / "config.json", plan.result.config)
    for file in plan.source.side_files:
        copy_side_file(plan.source.path / file, partial / file)
    partial.rename(target)


def _plan_quantize(options: Quantize, source: Checkpoint, target: Path, max_shard_size: int) -> StagePlan:
    choices = [Choice(o.targets, None if o.format == "bf16" else o.build()) for o in options.overrides]
    plan = plan_quantize(
        source,
        options.build(),
        targets=options.targets,
        ignore=options.ignore,
        overrides=choices,
        max_shard_size=max_shard_size,
    )

    def write(directory: Path, device: torch.device, advance: Advance) -> None:
        run_streaming(plan, directory, device, advance)

    return StagePlan(
        name="quantize",
        summary=f"quantize to {options.format} ({options.method})",
        source=source,
        result=Checkpoint(target, plan.config, _planned_tensors(plan.shards, target)),
        shards=plan.shards,
        layers=_layers(plan),
        write=write,
    )


def _planned_tensors(shards: ShardPlan, directory: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for filename, specs in shards.files.items():
        at = len(encode_header(specs))
        for name, spec in specs.items():
            tensors[name] = TensorInfo(spec, directory / filename, at)
            at += spec.nbytes
    return tensors


def _layers(plan: QuantizePlan) -> list[LayerRow]:
    rows = []
    for assignment in plan.assignments:
        module = assignment.module
        after = sum(spec.nbytes for spec in stored_specs(module, assignment.fmt).values())
        becomes = assignment.fmt.name if assignment.fmt else "16 bits"
        rows.append(LayerRow(module, becomes, assignment.reason, module.weight.nbytes, after))
    return rows
