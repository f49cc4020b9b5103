"""What the kv_cache stage will do, from headers alone, and doing it: every tensor carried over, scales added.

The weights do not change; what shrinks is the memory of the tokens in flight. Works on 16-bit checkpoints and on those
whose weights are quantized, whose block in config.json then also names the KV cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError, Refused
from compress.progress import Advance
from compress.tensor_file import Spec
from compress.writer import ShardPlan, ShardWriter, plan_shards
from quant.kv.config import config_with_scheme, scale_names, scale_problem
from quant.kv.layers import Attention, attention_layers, misfit
from quant.kv.schemes import KvScheme
from quant.stream import copy_tensor

__all__ = ["KvPlan", "plan_kv_cache", "write_kv_cache"]

FULL_BITS = 16  # of a cache that is not quantized


@dataclass(frozen=True)
class KvPlan:
    """Everything the stage will do.

    layers   by index, all that keep keys and values
    scales   tensors to add, by name
    shards   which file each tensor goes to
    config   the new config.json
    """

    checkpoint: Checkpoint
    scheme: KvScheme
    layers: Mapping[int, Attention]
    scales: Mapping[str, Spec]
    shards: ShardPlan
    config: dict[str, Any]

    def token_bytes(self, attention: Attention) -> tuple[int, int]:
        """Bytes that one token's keys and values take in one layer, in 16 bits and in the scheme."""
        elements = 2 * attention.heads * attention.head_dim
        return elements * FULL_BITS // 8, round(elements * self.scheme.bits(attention.head_dim) / 8)


def plan_kv_cache(checkpoint: Checkpoint, scheme: KvScheme, *, max_shard_size: int) -> KvPlan:
    """Decide every byte of the output.

    Raises:
        CheckpointError: a kind of attention whose cache is not emulated.
        RecipeError: the KV cache is quantized already, or the scheme does not fit the model.
    """
    layers = attention_layers(checkpoint)
    problem = misfit(layers, scheme)
    if problem:
        raise RecipeError(f"the KV cache cannot be quantized so: {problem}")
    shape_of = scheme.scale_shape
    scales = (
        {name: Spec(torch.float32, shape_of(a.heads)) for a in layers.values() for name in scale_names(a)}
        if shape_of
        else {}
    )
    outputs = checkpoint.specs | scales
    config = config_with_scheme(checkpoint.config, scheme)
    return KvPlan(checkpoint, scheme, layers, scales, plan_shards(outputs, max_shard_size), config)


def write_kv_cache(plan: KvPlan, directory: Path, scales: Mapping[str, Tensor], advance: Advance) -> None:
    """Write the planned shards into `directory`; `advance` is told source bytes as they are done.

    Raises:
        Refused: a scale that is no positive number, or a weight that is not finite.
    """
    for name, scale in scales.items():
        problem = scale_problem(scale)
        if problem:
            raise Refused(f"{name} {problem}: it is not written")
    with ShardWriter(directory, plan.shards) as writer:
        for name, info in plan.checkpoint.tensors.items():
            copy_tensor(name, info, info.dtype, writer, advance)
        for name in plan.scales:
            writer.append(name, scales[name])
