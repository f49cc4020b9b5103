"""The prune stage: planned from headers; the code that calibrates is loaded when it runs."""

from pathlib import Path
from typing import Any

import torch

from compress.architectures import layer_of
from compress.checkpoint import Checkpoint
from compress.modules import modules
from compress.progress import Advance
from compress.stage_plan import LayerRow, Place, StagePlan, planned_tensors
from prune.options import Prune
from prune.plan import PrunePlan, plan_prune

__all__ = ["plan_prune_stage"]


def plan_prune_stage(options: Prune, source: Checkpoint, target: Path, place: Place) -> StagePlan:
    """Plan the stage.

    Raises:
        InputError: a target that no legal dims meet, an axis that the model does not have.
    """
    plan = plan_prune(
        source, options.axes, options.goal(), round_to=options.round_to, max_shard_size=place.max_shard_size
    )

    def write(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        from prune.run import How, run_prune  # brings the model code, which planning does not need

        tokens = place.calibration_tokens(options.calibration, source)
        journal = target.with_name(f"{target.name}.journal")
        how = How(options.method, options.layer_score, tokens, journal, place.trust_remote_code)
        return run_prune(plan, how, directory, device, advance)

    return StagePlan(
        name="prune",
        summary=f"prune {', '.join(axis for axis in plan.before if plan.cut(axis))} ({options.method})",
        source=source,
        result=Checkpoint(target, plan.config, planned_tensors(plan.shards, target)),
        shards=plan.shards,
        layers=_rows(plan),
        write=write,
        candidates=plan.table(),
    )


def _rows(plan: PrunePlan) -> list[LayerRow]:
    """What every matrix becomes; of layers and experts that go, the last stand for those that the run will choose."""
    rows = []
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
        becomes = "×".join(map(str, spec.shape)) if cut else "unchanged"
        after = module.weight.nbytes * spec.nbytes // plan.checkpoint.tensors[module.tensor].nbytes
        rows.append(LayerRow(module.name, module.shape, becomes, "", module.weight.nbytes, after))
    return rows
