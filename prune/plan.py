"""What the prune stage will do, from headers alone: the new dims, the new configuration, every tensor's new shape."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.architectures import layer_of
from compress.checkpoint import Checkpoint, quantization_block
from compress.errors import CheckpointError
from compress.tensor_file import Spec
from compress.writer import ShardPlan, plan_shards
from prune.dims import AXES, Dims, check_axis, cut_spec, dims_of, expert_of, pruned_config
from prune.target import Candidate, Target, candidates_for, check_reached, exact_dims, splits

__all__ = ["PrunePlan", "drop_layers", "plan_prune"]

SHOWN = 12  # candidates in the dry run's table


@dataclass(frozen=True)
class PrunePlan:
    """Everything the stage will do.

    before, after  the dims of the source and of the result
    outputs        every tensor to write
    candidates     the dims that were nearest to the target, the chosen ones first
    tried          of them those that a search will compare, the chosen ones first; empty where nothing is searched
    """

    checkpoint: Checkpoint
    before: Dims
    after: Dims
    outputs: Mapping[str, Spec]
    shards: ShardPlan
    config: dict[str, Any]
    candidates: Sequence[Candidate]
    source: Candidate
    tried: Sequence[Candidate] = ()

    def cut(self, axis: str) -> bool:
        """Whether an axis shrinks."""
        return axis in self.before and self.after[axis] < self.before[axis]

    def propagates(self, method: str) -> bool:
        """Whether the refit aims at the whole model: where layers or channels go, and no mixture stands for an FFN."""
        return method == "obs" and not self.before.get("experts") and (self.cut("layers") or self.cut("ffn"))

    @property
    def params(self) -> int:
        """Of the result."""
        return self.candidates[0].params

    def dims(self) -> str:
        """What is new, in the words of config.json."""
        return ", ".join(f"{AXES[axis][0]} {size}" for axis, size in self.after.items() if self.cut(axis))

    def table(self) -> list[dict[str, str]]:
        """The candidates for people, a row each, the source first."""
        dims = [candidate.dims for candidate in self.tried]
        words = ["tried" if c.dims in dims else "chosen" if c is self.candidates[0] else "" for c in self.candidates]
        rows = zip(["source", *words], (self.source, *self.candidates), strict=True)
        return [{"": word} | _row(candidate, self.source) for word, candidate in rows]


def plan_prune(
    checkpoint: Checkpoint,
    axes: Sequence[str],
    target: Target | Dims,
    *,
    round_to: int,
    max_shard_size: int,
    most: int = 1,
) -> PrunePlan:
    """Decide every byte of the output but the values; with `most` above 1, for the first of so many to try.

    Raises:
        CheckpointError: an axis that the model does not have, or a quantized source.
        RecipeError: a target that no legal dims meet.
    """
    if quantization_block(checkpoint.config) is not None:
        raise CheckpointError(f"{checkpoint.path} is quantized: prune the 16-bit checkpoint and quantize the result")
    before = dims_of(checkpoint)
    for axis in axes if isinstance(target, Target) else target:
        check_axis(checkpoint, axis, before)
    tried: Sequence[Candidate] = ()
    if isinstance(target, Target):
        found = candidates_for(checkpoint, axes, before, round_to)
        check_reached(found, target, axes)
        wanted = target.wanted(found[0].amount(target.unit))
        near = sorted(found[1:], key=lambda c: abs(c.amount(target.unit) - wanted))[:SHOWN]
        tried = splits(found, target, axes, most)
        candidates, source = [*tried, *(c for c in near if c not in tried)], found[0]
    else:
        candidates = [exact_dims(checkpoint, before, target)]
        source = candidates_for(checkpoint, (), before, round_to)[0]
    after = candidates[0].dims
    view = drop_layers(checkpoint, range(after["layers"]))
    outputs = {
        name: cut_spec(view, name, before, after)
        for name in view.tensors
        if (expert_of(name) or 0) < after.get("experts", math.inf)
    }
    config = pruned_config(checkpoint, before, after)
    shards = plan_shards(outputs, max_shard_size)
    compared = tried if len(tried) > 1 else ()
    return PrunePlan(checkpoint, before, after, outputs, shards, config, candidates, source, compared)


def drop_layers(checkpoint: Checkpoint, kept: Sequence[int]) -> Checkpoint:
    """The same files seen as a model of only these layers, renumbered; nothing is copied."""
    before = dims_of(checkpoint)
    number = {layer: i for i, layer in enumerate(kept)}
    tensors = {}
    for name, info in checkpoint.tensors.items():
        layer = layer_of(name)
        if layer is None or layer in number:
            new = name if layer is None else name.replace(f".{layer}.", f".{number[layer]}.", 1)
            tensors[new] = info
    after = before | {"layers": len(kept)}
    return replace(checkpoint, tensors=tensors, config=pruned_config(checkpoint, before, after))


def _row(candidate: Candidate, source: Candidate) -> dict[str, str]:
    dims = {axis: str(size) for axis, size in candidate.dims.items()}
    change = candidate.params / source.params - 1
    return {
        **dims,
        "params": f"{candidate.params / 1e6:,.1f} M",
        "change": f"{change:+.2%}",
        "bytes": f"{candidate.nbytes / 1e6:,.1f} MB",
        "ffn ÷": str(math.gcd(candidate.dims.get("ffn", 256), 256)),
    }
