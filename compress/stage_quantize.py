"""The quantize stage: rounding that streams, calibrated methods, and the way back to 16 bits."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.checkpoint import Checkpoint, quantization_block
from compress.errors import RecipeError
from compress.progress import Advance
from compress.ranks import helped, processes
from compress.stage_plan import LayerRow, Place, StagePlan, planned_tensors
from quant.dequantizing import plan_dequantize, run_dequantize
from quant.methods import ITERATIONS, METHODS
from quant.options import Quantize
from quant.plan import Choice, QuantizePlan, plan_quantize, stored_specs
from quant.stored import StoredModule
from quant.stream import run_streaming

if TYPE_CHECKING:
    from quant.calibrated import Calibration

__all__ = ["plan_quantize_stage", "quantize_plan"]


def quantize_plan(options: Quantize, source: Checkpoint, place: Place) -> QuantizePlan:
    """What the options of a recipe mean for a checkpoint; raises as `plan_quantize` does."""
    choices = [Choice(o.targets, None if o.format == "bf16" else o.build()) for o in options.overrides]
    return plan_quantize(
        source,
        options.build(),
        targets=options.targets,
        ignore=options.ignore,
        overrides=choices,
        max_shard_size=place.max_shard_size,
    )


def plan_quantize_stage(options: Quantize, source: Checkpoint, target: Path, place: Place) -> StagePlan:
    """Plan the stage.

    Raises:
        CheckpointError: the source is already quantized and `format` is not bf16.
        RecipeError: a selection that matches nothing, a shape a format cannot take, fused layers that would differ, or
            less to calibrate on than there are processes.
    """
    if options.format == "bf16" and quantization_block(source.config) is not None:
        return _plan_dequantize(source, target, place)
    _check_shares(options)
    plan = quantize_plan(options, source, place)
    layers = _layers(plan)
    bits = {row.name: round(8 * row.bytes_after / math.prod(row.shape), 3) for row in layers if not row.reason}

    def stream(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        errors = run_streaming(plan, directory, device, advance)
        return {"method": options.method, "bits": bits, "weight_errors": errors}

    def calibrate(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        from compress.walk import EXPERT_FLOOR  # brings the model code, which streaming does not need
        from quant.calibrated import Calibration, run_calibrated

        tokens = place.calibration_tokens(options.calibration, source)
        journal = target.with_name(f"{target.name}.journal")
        iterations = options.iterations or ITERATIONS
        calibration = Calibration(options.method, tokens, journal, iterations, place.trust_remote_code)
        others = partial(_take_part, options, source, place, calibration, (directory, device))
        with helped(others, journal, device):
            reports = run_calibrated(plan, calibration, directory, device, advance)
        seen = {"calibration_tokens": tokens.numel(), "expert_floor": EXPERT_FLOOR}
        return {"method": options.method, **seen, "bits": bits, "blocks": reports}

    return StagePlan(
        name="quantize",
        summary=f"quantize to {options.format} ({options.method})",
        source=source,
        result=Checkpoint(target, plan.config, planned_tensors(plan.shards, target)),
        shards=plan.shards,
        layers=layers,
        write=calibrate if METHODS[options.method].calibrated else stream,
    )


def _take_part(
    options: Quantize,
    source: Checkpoint,
    place: Place,
    calibration: "Calibration",
    where: tuple[Path, torch.device],
) -> Callable[[], object]:
    """What another process does: plan the same, then calibrate with the first, which writes."""
    from quant.calibrated import run_calibrated

    return partial(run_calibrated, quantize_plan(options, source, place), calibration, *where, lambda _: None)


def _check_shares(options: Quantize) -> None:
    """Refuse fewer batches than processes before anything is read; fewer texts than asked for show later.

    Raises:
        RecipeError: some process would have nothing to calibrate on.
    """
    if processes() == 1 or not METHODS[options.method].calibrated:
        return
    from compress.walk_block import BATCH_TOKENS, batches  # brings the model code

    samples, length = options.calibration.samples, options.calibration.length
    count = len(batches(torch.empty(samples, length, device="meta")))
    if count < processes():
        raise RecipeError(
            f"stages: {samples} samples of {length} tokens make {count} batches of {BATCH_TOKENS}, fewer than the "
            f"{processes()} processes: raise quantize.calibration.samples, or start fewer processes"
        )


def _plan_dequantize(source: Checkpoint, target: Path, place: Place) -> StagePlan:
    if not source.path.is_dir():
        raise RecipeError("stages: quantize: {format: bf16} makes a quantized model 16-bit, so it can only come first")
    plan = plan_dequantize(source, max_shard_size=place.max_shard_size)

    def row(module: StoredModule) -> LayerRow:
        before = sum(source.tensors[name].nbytes for name in module.tensors.values())
        return LayerRow(module.name, module.shape, "bf16", "", before, 2 * module.shape[0] * module.shape[1])

    return StagePlan(
        name="quantize",
        summary="dequantize to bf16",
        source=source,
        result=Checkpoint(target, plan.config, planned_tensors(plan.shards, target)),
        shards=plan.shards,
        layers=[row(module) for module in plan.stored.modules.values()],
        write=lambda directory, device, advance: run_dequantize(plan, directory, advance),
    )


def _layers(plan: QuantizePlan) -> list[LayerRow]:
    rows = []
    for assignment in plan.assignments:
        module = assignment.module
        after = sum(spec.nbytes for spec in stored_specs(module, assignment.fmt).values())
        becomes = assignment.fmt.name if assignment.fmt else "16 bits"
        rows.append(LayerRow(module.name, module.shape, becomes, assignment.reason, module.weight.nbytes, after))
    return rows
