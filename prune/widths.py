"""Widths: FFN channels, query heads and key-value groups of a block, chosen and refitted on the pruned prefix's inputs.

Both kinds end in a linear that reads what is removed: o_proj reads heads, down_proj reads channels. During the walk
only that linear changes, its removed columns set to zero, which computes the same as the smaller block. What is written
is the smaller block: the reader's kept columns, and the kept rows of those that produce them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import Refused
from compress.walk import Block
from compress.walk_statistics import Statistics
from prune.dims import Dims
from prune.obs import Units, columns_of, refit, select_obs
from prune.propagate import STRENGTH, observe_gap, takes_gap
from prune.scores import activation_score, random_score, top_units

__all__ = ["METHODS", "WIDTHS", "Cut", "Pruned", "prune_widths", "readers_of", "restore_widths", "slice_block"]

WIDTHS = ("ffn", "heads", "kv_groups")


@dataclass(frozen=True)
class Cut:
    """One choice among the columns of a reader: of these units so many stay."""

    units: Units
    keep: int


@dataclass(frozen=True)
class Reads:
    """A reader's weight (O, I), statistics of its inputs, and the share of G (O, I) to close where a twin shows it."""

    name: str
    weight: Tensor
    statistics: Statistics
    gap: Tensor | None = None


@dataclass(frozen=True)
class Columns:
    """What a method may look at: weights (O, I), second moments (I, I) and activity (I,) of the inputs, a seed."""

    weight: Tensor
    hessian: Tensor
    activity: Tensor
    seed: int


@dataclass(frozen=True)
class Pruned:
    """The kept columns of each reader by its full name, and which readers were aimed at the whole model's outputs."""

    kept: dict[str, list[int]]
    propagated: list[str]


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


def prune_widths(
    block: Block, cuts: Mapping[str, list[Cut]], method: str, before: Dims, strength: float = STRENGTH
) -> Pruned:
    """Choose and refit in place.

    Args:
        cuts: by the last part of a reader's name; none to make: it is refitted, if that can close a gap.
        strength: the share of the gap to the block's twin that a refit is to close.

    Raises:
        Refused: a block without the reader, or inputs that nothing can be fitted to.
    """
    kept: dict[str, list[int]] = {}
    propagated: list[str] = []
    for last, cut in cuts.items():  # in the order in which they compute
        names = [name for name in block.linears if name.rpartition(".")[2] == last]
        for reads in _observe(block, names, strength, needed=bool(cut)):
            try:
                columns, weight = _solve(reads, cut, method, before, seed=block.index)
            except (ValueError, RuntimeError) as error:
                raise Refused(f"{reads.name} cannot be pruned: {error}") from error
            block.linears[reads.name].weight.data.copy_(scatter(weight, columns, reads.weight.shape[1]))
            kept[reads.name] = columns.tolist()
            propagated += [reads.name] if reads.gap is not None else []
    missing = [last for last, cut in cuts.items() if cut and not any(name.endswith(f".{last}") for name in kept)]
    if missing:
        raise Refused(f"{block.name} has no linear {', '.join(missing)} that its tokens reach: it cannot be pruned")
    return Pruned(kept, propagated)


def _observe(block: Block, names: list[str], strength: float, *, needed: bool) -> Iterator[Reads]:
    """What each of these linears reads; and the gap, where the walk has a twin and there is but one that closes it."""
    if block.twin is not None and len(names) == 1 and takes_gap(block, names[0]):
        weight = block.linears[names[0]].weight.detach().float()
        statistics, gap = observe_gap(block, names[0])
        yield Reads(names[0], weight, statistics, strength * gap)
    elif needed:
        for group in block.observe(names):
            yield Reads(group.names[0], group.weights[0], group.statistics)


def _solve(reads: Reads, cuts: list[Cut], method: str, before: Dims, *, seed: int) -> tuple[Tensor, Tensor]:
    """The kept columns of a reader and their new weights."""
    weight, statistics = reads.weight, reads.statistics
    hessian = statistics.hessian
    columns = torch.arange(weight.shape[1], device=weight.device)
    width = weight.shape[1] // before["heads"] if reads.name.endswith("o_proj") else 1
    for cut in cuts:
        units = Units(cut.units.count, cut.units.size * width, cut.units.sections)
        seen = Columns(
            refit(weight, hessian, columns), hessian[columns][:, columns], statistics.activity[columns], seed
        )
        chosen = METHODS[method](seen, units, cut.keep)
        columns = columns[columns_of(chosen.to(columns.device), units.size)]
    if method != "obs":
        return columns, weight[:, columns]
    return columns, refit(weight, hessian, columns, reads.gap)


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
    """Which rows stay of the linears that produce a reader's inputs; empty where all do, which changes none of them."""
    if len(columns) == width:
        return {}
    if reader == "down_proj":
        return {"gate_proj": columns, "up_proj": columns}
    head_dim = width // before["heads"]
    group = head_dim * (before["heads"] // before["kv_groups"])
    rows = columns_of(torch.unique(columns // group), head_dim)
    return {"q_proj": columns, "k_proj": rows, "v_proj": rows}
