"""The prune stage: planned from headers; the code that calibrates is loaded when it runs."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.architectures import layer_of
from compress.calibration_options import Calibration
from compress.checkpoint import Checkpoint
from compress.errors import InputError
from compress.modules import modules
from compress.progress import Advance
from compress.stage_plan import LayerRow, Place, StagePlan, planned_tensors
from prune.dims import AXES, Dims
from prune.options import Prune, Search
from prune.plan import PrunePlan, plan_prune
from prune.target import Target

__all__ = ["plan_prune_stage"]


def plan_prune_stage(options: Prune, source: Checkpoint, target: Path, place: Place) -> StagePlan:
    """Plan the stage.

    Raises:
        InputError: a target that no legal dims meet, an axis that the model does not have.
    """
    most = options.search.candidates if options.search else 1
    plan = _plan(options, options.goal(), source, place, most)
    journal = target.with_name(f"{target.name}.journal")

    def decide(device: torch.device, advance: Advance) -> tuple[Prune, list[dict[str, Any]]]:
        from prune.run import How  # brings the model code, which planning does not need
        from prune.search import search_splits

        assert options.search is not None
        tokens, held_out = _searched(options.calibration, options.search, source, place)
        plans = [_plan(options, _changed(tried.dims, plan.before), source, place, 1) for tried in plan.tried]
        how = How(options.method, options.layer_score, tokens, journal, place.trust_remote_code)
        folder = target.with_name(f"{target.name}.search")
        found = search_splits(plans, how, held_out, folder, device, lambda done: advance(done // len(plans)))
        best = _changed(found[0].plan.after, plan.before)
        dims = {AXES[axis][0]: size for axis, size in best.items()}
        rows = [{**each.plan.after, "parameters": each.plan.params, "kl": each.kl} for each in found]
        return options.model_copy(update={"target": dims, "search": None}), rows

    def write(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        from prune.run import How, run_prune

        tokens = place.calibration_tokens(options.calibration, source)
        how = How(options.method, options.layer_score, tokens, journal, place.trust_remote_code)
        report = run_prune(plan, how, directory, device, advance)
        shutil.rmtree(journal, ignore_errors=True)
        return report

    return StagePlan(
        name="prune",
        summary=f"prune {', '.join(_label(axis, options) for axis in plan.before if plan.cut(axis))}",
        source=source,
        result=Checkpoint(target, plan.config, planned_tensors(plan.shards, target)),
        shards=plan.shards,
        layers=_rows(plan, options.method),
        write=write,
        candidates=plan.table(),
        decide=decide if plan.tried else None,
    )


def _label(axis: str, options: Prune) -> str:
    by_score = axis == "layers" and options.method != "random"
    return f"{axis} ({options.layer_score if by_score else options.method})"


def _plan(options: Prune, goal: Target | Dims, source: Checkpoint, place: Place, most: int) -> PrunePlan:
    size = place.max_shard_size
    return plan_prune(source, options.axes, goal, round_to=options.round_to, max_shard_size=size, most=most)


def _changed(dims: Dims, before: Dims) -> Dims:
    return {axis: size for axis, size in dims.items() if size != before[axis]}


def _searched(wanted: Calibration, search: Search, source: Checkpoint, place: Place) -> tuple[Tensor, Tensor]:
    """Tokens to calibrate the tried ones on and others to judge them on, both (N, T), a sequence between them left out.

    Raises:
        InputError: too few.
    """
    count = search.samples + 1 + search.held_out
    tokens = place.calibration_tokens(wanted.model_copy(update={"samples": count}), source)
    if len(tokens) < search.held_out + 2:
        raise InputError(
            f"the calibration texts hold {len(tokens)} sequences of {wanted.length} tokens, too few to hold out "
            f"{search.held_out} for the search: lower search.held_out or calibration.length"
        )
    return tokens[: -search.held_out - 1], tokens[-search.held_out :]


def _rows(plan: PrunePlan, method: str) -> list[LayerRow]:
    """What every matrix becomes; of layers and experts that go, the last stand for those that the run will choose."""
    rows = []
    refits = plan.propagates(method) and plan.cut("layers")
    for module in modules(plan.checkpoint):
        spec = plan.outputs.get(module.tensor)
        layer = layer_of(module.name)
        if spec is None:
            what = "layer" if layer is not None and layer >= plan.after["layers"] else "expert"
            rows.append(
                LayerRow(module.name, module.shape, "removed", f"which {what}s go is measured", module.weight.nbytes, 0)
            )
            continue
        cut = spec.shape != plan.checkpoint.tensors[module.tensor].shape
        kept = "may be refitted" if refits and module.name.endswith(".down_proj") else "unchanged"
        becomes = "×".join(map(str, spec.shape)) if cut else kept
        after = module.weight.nbytes * spec.nbytes // plan.checkpoint.tensors[module.tensor].nbytes
        rows.append(LayerRow(module.name, module.shape, becomes, "", module.weight.nbytes, after))
    return rows
