"""Widths: FFN channels, query heads and key-value groups of a block, chosen and refitted on the pruned prefix's inputs.

Both kinds end in a linear that reads what is removed: o_proj reads heads, down_proj reads channels. During the walk
only that linear changes, its removed columns set to zero, which computes the same as the smaller block. What is written
is the smaller block: the reader's kept columns, and the kept rows of those that produce them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import Refused
from compress.walk import Block, Group
from prune.dims import Dims
from prune.obs import Units, columns_of, refit, select_obs
from prune.scores import activation_score, random_score, top_units

__all__ = ["METHODS", "WIDTHS", "prune_widths", "readers_of", "restore_widths", "slice_block"]

WIDTHS = ("ffn", "heads", "kv_groups")


@dataclass(frozen=True)
class Cut:
    """One choice among the columns of a reader: of these units so many stay."""

    units: Units
    keep: int


@dataclass(frozen=True)
class Columns:
    """What a method may look at: weights (O, I), second moments (I, I) and activity (I,) of the inputs, a seed."""

    weight: Tensor
    hessian: Tensor
    activity: Tensor
    seed: int


def readers_of(before: Dims, after: Dims) -> dict[str, list[Cut]]:
    """Reader -> the cuts to make, in turn: whole key-value groups first, then query heads within each that is left."""
    found: dict[str, list[Cut]] = {}
    groups, per_group = before["kv_groups"], before["heads"] // before["kv_groups"]
    if after["kv_groups"] < groups:
        found["o_proj"] = [Cut(Units(groups, per_group), after["kv_groups"])]
    if after["heads"] // after["kv_groups"] < per_group:
        cut = Cut(Units(after["kv_groups"] * per_group, 1, after["kv_groups"]), after["heads"])
        found.setdefault("o_proj", []).append(cut)
    if after.get("ffn", 0) < before.get("ffn", 0):
        found["down_proj"] = [Cut(Units(before["ffn"]), after["ffn"])]
    return found


def prune_widths(block: Block, cuts: Mapping[str, list[Cut]], method: str, before: Dims) -> dict[str, list[int]]:
    """Choose and refit in place; returns the kept columns of each reader, by its full name.

    Raises:
        Refused: a block without the reader, or inputs that nothing can be fitted to.
    """
    readers = {name: cuts[last] for name in block.linears if (last := name.rpartition(".")[2]) in cuts}
    kept: dict[str, list[int]] = {}
    for group in block.groups([*readers]):
        name = group.names[0]
        try:
            columns, weight = _solve(group, readers[name], method, before, seed=block.index)
        except (ValueError, RuntimeError) as error:
            raise Refused(f"{name} cannot be pruned: {error}") from error
        group.replace([scatter(weight, columns, group.weights[0].shape[1])])
        kept[name] = columns.tolist()
    if len(kept) < len(cuts):
        raise Refused(f"{block.name} has no linear {', '.join(cuts)} that its tokens reach: it cannot be pruned")
    return kept


def _solve(group: Group, cuts: list[Cut], method: str, before: Dims, *, seed: int) -> tuple[Tensor, Tensor]:
    """The kept columns of the group's linear and their new weights."""
    weight, statistics = group.weights[0], group.statistics
    hessian = statistics.hessian
    columns = torch.arange(weight.shape[1], device=weight.device)
    width = weight.shape[1] // before["heads"] if group.names[0].endswith("o_proj") else 1
    for cut in cuts:
        units = Units(cut.units.count, cut.units.size * width, cut.units.sections)
        seen = Columns(
            refit(weight, hessian, columns), hessian[columns][:, columns], statistics.activity[columns], seed
        )
        chosen = METHODS[method](seen, units, cut.keep)
        columns = columns[columns_of(chosen.to(columns.device), units.size)]
    return columns, refit(weight, hessian, columns) if method == "obs" else weight[:, columns]


def _obs(seen: Columns, units: Units, keep: int) -> Tensor:
    return select_obs(seen.weight, seen.hessian, units, keep)


def _activation(seen: Columns, units: Units, keep: int) -> Tensor:
    return top_units(activation_score(seen.activity, units), units, keep)


def _random(seen: Columns, units: Units, keep: int) -> Tensor:
    return top_units(random_score(units, seen.seed), units, keep)


METHODS: Mapping[str, Callable[[Columns, Units, int], Tensor]] = {
    "obs": _obs,
    "activation": _activation,
    "random": _random,
}


def scatter(weight: Tensor, columns: Tensor, width: int) -> Tensor:
    """(O, K) at `columns` of (O, width), zero elsewhere."""
    full = torch.zeros(len(weight), width, dtype=torch.float32, device=weight.device)
    full[:, columns] = weight.float()
    return full


def restore_widths(block: Block, tensors: Mapping[str, Tensor], kept: Mapping[str, list[int]]) -> None:
    """Put a finished block's readers in place."""
    for name, columns in kept.items():
        linear = block.linears[name]
        stored = tensors[f"{name}.weight"].to(block.device)
        linear.weight.data.copy_(scatter(stored, torch.tensor(columns, device=block.device), linear.in_features))


def slice_block(block: Block, kept: Mapping[str, list[int]], before: Dims) -> dict[str, Tensor]:
    """The smaller tensors of a pruned block, by full name."""
    found: dict[str, Tensor] = {}
    for reader, listed in kept.items():
        parent, _, last = reader.rpartition(".")
        columns = torch.tensor(listed, device=block.device)
        found[f"{reader}.weight"] = block.tensors[f"{reader}.weight"][:, columns]
        for name, rows in _producers(last, columns, before, block.linears[reader].in_features).items():
            for leaf in ("weight", "bias"):
                tensor = block.tensors.get(f"{parent}.{name}.{leaf}")
                if tensor is not None:
                    found[f"{parent}.{name}.{leaf}"] = tensor[rows]
    return found


def _producers(reader: str, columns: Tensor, before: Dims, width: int) -> dict[str, Tensor]:
    """Which rows stay of the linears that produce a reader's inputs."""
    if reader == "down_proj":
        return {"gate_proj": columns, "up_proj": columns}
    head_dim = width // before["heads"]
    group = head_dim * (before["heads"] // before["kv_groups"])
    rows = columns_of(torch.unique(columns // group), head_dim)
    return {"q_proj": columns, "k_proj": rows, "v_proj": rows}
