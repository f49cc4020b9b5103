"""Stages: each from a checkpoint directory to a checkpoint directory, planned from headers before it runs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.calibration import calibration_texts
from compress.checkpoint import Checkpoint, read_json
from compress.progress import Advance
from compress.recipe import Stage
from compress.stage_distill import plan_distill
from compress.stage_draft import plan_draft
from compress.stage_plan import LayerRow, Place, StagePlan, planned_tensors
from compress.stage_prune import plan_prune_stage
from compress.stage_quantize import plan_quantize_stage
from compress.writer import copy_side_file, write_json
from quant.kv.layers import Attention
from quant.kv.options import KvCache
from quant.kv.plan import KvPlan, plan_kv_cache, write_kv_cache

__all__ = ["LayerRow", "Place", "StagePlan", "plan_stages", "read_report", "run_stage"]


def plan_stages(stages: Sequence[Stage], source: Checkpoint, place: Place) -> list[StagePlan]:
    """Plan every stage on what the one before it will write.

    Raises:
        InputError: what any stage refuses.
    """
    plans: list[StagePlan] = []
    place = replace(place, origin=source)
    following = [*(getattr(stage, stage.name) for stage in stages[1:]), None]
    for i, stage in enumerate(stages):
        plan = PLANNERS[stage.name]
        place = replace(place, following=following[i])
        plans.append(plan(getattr(stage, stage.name), source, place.directory / f"{i}-{stage.name}", place))
        source = plans[-1].result
    return plans


def run_stage(plan: StagePlan, device: torch.device, advance: Advance) -> dict[str, Any]:
    """Write the stage's directory: shards, config.json and side files, all of it or nothing.

    A later stage's source is where the stage before has written it by now, at the planned offsets.

    Args:
        advance: called with source bytes as they are done.
    """
    target = plan.result.path
    partial = target.with_name(f"{target.name}.partial")
    partial.mkdir(parents=True)
    report = plan.write(partial, device, advance)
    write_json(partial / "config.json", plan.result.config)
    for file in plan.source.side_files:
        copy_side_file(plan.source.path / file, partial / file)
    write_json(_report_file(plan), report)
    partial.rename(target)
    return report


def read_report(plan: StagePlan) -> dict[str, Any]:
    """What `run_stage` returned when an earlier run did the stage."""
    return read_json(_report_file(plan))


def _report_file(plan: StagePlan) -> Path:
    return plan.result.path.with_name(f"{plan.result.path.name}.report.json")


def _plan_kv_cache(options: KvCache, source: Checkpoint, target: Path, place: Place) -> StagePlan:
    plan = plan_kv_cache(source, options.build(), max_shard_size=place.max_shard_size)

    def write(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        from quant.kv.calibrate import find_scales  # brings the model code

        wanted, texts = options.calibration, None
        if options.calibrated:
            found = calibration_texts(wanted.documents, wanted.problems, place.evaluated)
            texts = [*itertools.islice(found, wanted.samples)]
        scales = find_scales(
            plan, texts, max_tokens=wanted.length, device=device, trust_remote_code=place.trust_remote_code
        )
        write_kv_cache(plan, directory, scales, advance)
        return {"calibration_texts": len(texts or [])}

    return StagePlan(
        name="kv_cache",
        summary=f"KV cache to {plan.scheme.label}, {plan.scheme.serving}; bytes of one token's keys and values",
        source=source,
        result=Checkpoint(target, plan.config, planned_tensors(plan.shards, target)),
        shards=plan.shards,
        layers=[_kv_row(plan, attention) for attention in plan.layers.values()],
        write=write,
    )


def _kv_row(plan: KvPlan, attention: Attention) -> LayerRow:
    shape = (2 * attention.heads, attention.head_dim)
    return LayerRow(attention.name, shape, plan.scheme.name, "", *plan.token_bytes(attention))


PLANNERS: Mapping[str, Callable[[Any, Checkpoint, Path, Place], StagePlan]] = {
    "quantize": plan_quantize_stage,
    "kv_cache": _plan_kv_cache,
    "distill": plan_distill,
    "draft": plan_draft,
    "prune": plan_prune_stage,
}
