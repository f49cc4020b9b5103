"""The dimensions that pruning changes: where they stand in a configuration and which tensors they cut.

A model's dims are one number per axis, the same in every layer, because no engine loads layers of different widths.
Left out: hidden width, vocabulary, the width of single experts, attention that is not made of q, k, v and o.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compress.architectures import ROUTERS, layer_of
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.tensor_file import Spec

__all__ = [
    "AXES",
    "CUTS",
    "Dims",
    "Sizes",
    "by_expert",
    "check_axis",
    "cut_spec",
    "dims_of",
    "expert_of",
    "pruned_config",
]

# axis -> its name in config.json, the first that is there
AXES: Mapping[str, tuple[str, ...]] = {
    "ffn": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_groups": ("num_key_value_heads",),
    "layers": ("num_hidden_layers",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}
# linear -> the axis that its size hangs on, and along which dimension; a bias goes with the rows
CUTS: Mapping[str, tuple[str, int]] = {
    "gate_proj": ("ffn", 0),
    "up_proj": ("ffn", 0),
    "down_proj": ("ffn", 1),
    "q_proj": ("heads", 0),
    "o_proj": ("heads", 1),
    "k_proj": ("kv_groups", 0),
    "v_proj": ("kv_groups", 0),
}
NEEDED: Mapping[str, tuple[str, ...]] = {
    "ffn": ("up_proj", "down_proj"),
    "heads": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "kv_groups": ("q_proj", "k_proj", "v_proj", "o_proj"),
}

Dims = Mapping[str, int]  # axis -> size, the axes that the model has


def dims_of(checkpoint: Checkpoint) -> dict[str, int]:
    """The model's dims, from its configuration."""
    config = checkpoint.text_config
    found = {axis: next((config[key] for key in keys if key in config), None) for axis, keys in AXES.items()}
    if found["kv_groups"] is None:
        found["kv_groups"] = found["heads"]
    return {axis: int(size) for axis, size in found.items() if size is not None}


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor belongs to; None for other tensors and for fused ones."""
    parts = name.split(".")
    at = parts.index("experts") + 1 if "experts" in parts else len(parts)
    return int(parts[at]) if at < len(parts) and parts[at].isdigit() else None


def by_expert(name: str) -> bool:
    """Whether a tensor has an entry per expert along its first dim: routers with their biases, fused experts."""
    module = name.rpartition(".")[0]
    if layer_of(name) is None or "shared_expert" in name or expert_of(name) is not None:
        return False
    return ".experts." in name or module.rpartition(".")[2] in ROUTERS


def cut_spec(checkpoint: Checkpoint, name: str, before: Dims, after: Dims) -> Spec:
    """Dtype and shape of a tensor that is kept, in the pruned model."""
    spec = checkpoint.tensors[name].spec
    found = _cut(name)
    if found is None:
        return spec
    axis, dim = found
    shape = list(spec.shape)
    shape[dim] = shape[dim] * after[axis] // before[axis]
    return Spec(spec.dtype, tuple(shape))


def _cut(name: str) -> tuple[str, int] | None:
    """The axis and dimension along which a tensor of a layer is cut."""
    module, _, leaf = name.rpartition(".")
    if by_expert(name):
        return "experts", 0
    if layer_of(name) is None or ".experts." in name:
        return None
    last = module.rpartition(".")[2]
    if last not in CUTS or "shared_expert" in name:
        return None
    axis, dim = CUTS[last]
    return None if leaf == "bias" and dim else (axis, dim)


@dataclass(frozen=True)
class Sizes:
    """Parameters and bytes of a model of given dims, counted without visiting every tensor again.

    groups   (cut, shape, bytes per element, in a layer, of an expert) -> number of tensors
    """

    before: Dims
    groups: Mapping[tuple[Any, ...], int]

    @staticmethod
    def of(checkpoint: Checkpoint, before: Dims) -> "Sizes":
        """Count a checkpoint's tensors."""
        groups = Counter(
            (
                _cut(name),
                info.shape,
                info.dtype.itemsize,
                layer_of(name) is not None,
                expert_of(name) is not None,
            )
            for name, info in checkpoint.tensors.items()
        )
        return Sizes(before, groups)

    def count(self, dims: Dims) -> tuple[int, int]:
        """(parameters, bytes)."""
        elements = [*self._elements(dims)]
        return sum(count for count, _ in elements), sum(count * size for count, size in elements)

    def _elements(self, dims: Dims) -> Iterator[tuple[int, int]]:
        for (cut, shape, itemsize, layered, expert), count in self.groups.items():
            elements = math.prod(shape) * count
            scaled = ([cut[0]] if cut else []) + ["layers"] * layered + ["experts"] * expert
            for axis in scaled:
                elements = elements * dims[axis] // self.before[axis]
            yield elements, itemsize


def check_axis(checkpoint: Checkpoint, axis: str, before: Dims) -> None:
    """Refuse an axis that this model's layers do not have.

    Raises:
        CheckpointError: it has no such axis, or its layers are built otherwise.
    """
    if axis not in before:
        raise CheckpointError(f"{checkpoint.path} has no axis {axis!r} ({' or '.join(AXES[axis])} in config.json)")
    if axis == "ffn" and "experts" in before:
        raise CheckpointError("the width of a mixture's experts is not pruned: use the axis experts")
    if axis == "layers":
        _check_layers_alike(checkpoint, before["layers"])
    for last in NEEDED.get(axis, ()):
        wrong = [layer for layer in range(before["layers"]) if not _has(checkpoint, layer, last, before)]
        if wrong:
            raise CheckpointError(
                f"axis {axis!r} needs {last} of the expected size in every layer: {wrong[0]} has none"
            )


def _has(checkpoint: Checkpoint, layer: int, last: str, before: Dims) -> bool:
    config = checkpoint.text_config
    head_dim = config.get("head_dim") or config["hidden_size"] // before["heads"]
    axis, dim = CUTS[last]
    size = before[axis] * (1 if axis == "ffn" else head_dim)
    return any(
        name.endswith(f".{last}.weight") and layer_of(name) == layer and info.shape[dim] == size
        for name, info in checkpoint.tensors.items()
    )


def _check_layers_alike(checkpoint: Checkpoint, layers: int) -> None:
    kinds: dict[int, list[tuple[str, Spec]]] = {}
    for name, info in checkpoint.tensors.items():
        layer = layer_of(name)
        if layer is not None:
            kinds.setdefault(layer, []).append((name.replace(f".{layer}.", ".*.", 1), info.spec))
    if len(kinds) != layers:
        raise CheckpointError(f"config.json has {layers} layers, the tensors {len(kinds)}: layers cannot be dropped")
    if len({tuple(sorted(kind, key=str)) for kind in kinds.values()}) > 1 or len(_mixed(checkpoint, layers)) > 0:
        raise CheckpointError(
            "the layers are of several kinds, so which are left would change the model: drop no layers"
        )


def _mixed(checkpoint: Checkpoint, layers: int) -> list[str]:
    """Lists of the configuration with an entry per layer that are not all alike."""
    lists = {key: value for key, value in checkpoint.text_config.items() if isinstance(value, list)}
    return [key for key, value in lists.items() if len(value) == layers and len({str(entry) for entry in value}) > 1]


def pruned_config(checkpoint: Checkpoint, before: Dims, after: Dims) -> dict[str, Any]:
    """config.json of the pruned model: every number that says a dim, nested where it was nested."""
    config = checkpoint.text_config
    changed: dict[str, Any] = {}
    for axis, size in after.items():
        changed |= {key: size for key in AXES[axis] if key in config}
    if after["heads"] != before["heads"]:
        changed["head_dim"] = config.get("head_dim") or config["hidden_size"] // before["heads"]
        changed["num_key_value_heads"] = after["kv_groups"]
    if after["layers"] != before["layers"]:
        lists = {
            key: value for key, value in config.items() if isinstance(value, list) and len(value) == before["layers"]
        }
        changed |= {key: value[: after["layers"]] for key, value in lists.items()}
        if "max_window_layers" in config:
            changed["max_window_layers"] = min(config["max_window_layers"], after["layers"])
    nested = checkpoint.config.get("text_config")
    if isinstance(nested, dict):
        return checkpoint.config | {"text_config": nested | changed}
    return checkpoint.config | changed
