"""A quantized checkpoint back to bfloat16: `format: bf16` on a source that is already quantized.

Never done silently, since what rounding took does not come back: it is for engines that cannot read the format, and
for changing format where the 16-bit checkpoint is lost. Scales of inputs and of the KV cache go with the format.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint import BLOCKS, Checkpoint
from compress.errors import Refused
from compress.progress import Advance
from compress.tensor_file import Spec
from compress.writer import ShardPlan, ShardWriter, plan_shards
from quant.plan import cast_config, cast_spec
from quant.stored import Stored, StoredModule, sort_tensors
from quant.stream import copy_tensor

__all__ = ["DequantizePlan", "plan_dequantize", "run_dequantize"]


@dataclass(frozen=True)
class DequantizePlan:
    """Every byte of the 16-bit checkpoint, from headers alone; `stored` says where its weights come from."""

    checkpoint: Checkpoint
    stored: Stored
    shards: ShardPlan
    config: dict[str, Any]


def plan_dequantize(checkpoint: Checkpoint, *, max_shard_size: int) -> DequantizePlan:
    """Plan the bfloat16 twin of a quantized checkpoint: what an engine computes with, rounded to bfloat16.

    Raises:
        CheckpointError: quantized in a way that is not read, or configuration and files disagree.
    """
    stored = sort_tensors(checkpoint)
    outputs = {f"{name}.weight": Spec(torch.bfloat16, module.shape) for name, module in stored.modules.items()}
    outputs |= {name: cast_spec(checkpoint.tensors[name].spec) for name in stored.plain}
    config = {key: value for key, value in checkpoint.config.items() if key not in BLOCKS}
    return DequantizePlan(checkpoint, stored, plan_shards(outputs, max_shard_size), cast_config(config))


def run_dequantize(plan: DequantizePlan, directory: Path, advance: Advance) -> dict[str, Any]:
    """Write the planned shards; memory holds one matrix in float32. Returns what was dropped, for run.json.

    Raises:
        Refused: a weight is NaN or infinite.
    """
    checkpoint, stored = plan.checkpoint, plan.stored
    with ShardWriter(directory, plan.shards) as writer:
        for name in stored.plain:
            info = checkpoint.tensors[name]
            copy_tensor(name, info, cast_spec(info.spec).dtype, writer, advance)
        for module in stored.modules.values():
            writer.append(f"{module.name}.weight", _weight(checkpoint, module))
            advance(sum(checkpoint.tensors[name].nbytes for name in module.tensors.values()))
    return {"input_scales_dropped": len(stored.input_scales), "kv_scales_dropped": len(stored.kv_scales)}


def _weight(checkpoint: Checkpoint, module: StoredModule) -> torch.Tensor:
    weight = module.weight(checkpoint).to(torch.bfloat16)
    if not bool(weight.isfinite().all()):
        raise Refused(f"{module.name} holds NaN or infinite values: the source checkpoint is damaged")
    return weight
