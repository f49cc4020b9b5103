"""From a target in the user's units to dims: every legal combination of the axes is counted, the best fit is taken.

A combination fits when its size is within the tolerance of the target (for `memory`, from below). Of those that fit,
the axis named last gives up least, then the one before it: `axes: [ffn, layers]` drops a layer only where widths alone
do not reach the target. Where a search is to decide, some of the others are tried too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from prune.dims import AXES, Dims, Sizes

__all__ = ["Candidate", "Target", "candidates_for", "check_reached", "exact_dims", "splits"]

MOST = 0.75  # of an axis is the most that is taken away
VALIDATES_HEADS = ("llama",)  # families whose configuration refuses heads that do not divide the hidden size


@dataclass(frozen=True)
class Target:
    """How small: `amount` of "params" or "memory" (bytes), a number or, if `relative`, a change of the source's."""

    unit: str
    amount: float
    relative: bool
    tolerance: float  # of the source's amount

    def wanted(self, source: int) -> float:
        """The amount that is aimed at."""
        return source * (1 + self.amount) if self.relative else self.amount


@dataclass(frozen=True)
class Candidate:
    """Dims with what they come to."""

    dims: Dims
    params: int
    nbytes: int

    def amount(self, unit: str) -> int:
        """Its size in the unit of a target."""
        return self.params if unit == "params" else self.nbytes


def candidates_for(checkpoint: Checkpoint, axes: Sequence[str], before: Dims, round_to: int) -> list[Candidate]:
    """Every legal combination of the axes, the source itself first."""
    sizes = Sizes.of(checkpoint, before)
    choices = [[*_legal(axis, before, checkpoint, round_to)] for axis in axes]
    found: list[Candidate] = []
    for combination in product(*choices):
        dims = complete(dict(before), dict(zip(axes, combination, strict=True)))
        if dims and legal_heads(checkpoint, dims):
            found.append(Candidate(dims, *sizes.count(dims)))
    return found


def _legal(axis: str, before: Dims, checkpoint: Checkpoint, round_to: int) -> Iterator[int]:
    """The sizes an axis may take, from its own down."""
    size = before[axis]
    config = checkpoint.text_config
    step = {"ffn": round_to, "heads": before["kv_groups"], "experts": config.get("n_group") or 1}.get(axis, 1)
    least = max(math.ceil(size * (1 - MOST)), config.get("num_experts_per_tok", 1) if axis == "experts" else 1)
    yield size
    yield from range((size - 1) // step * step, least - 1, -step)


def complete(before: Dims, given: Dims) -> dict[str, int] | None:
    """All dims, where some are given; None where query heads would not spread evenly over key-value heads.

    Fewer key-value groups take their query heads with them, unless the number of heads is given too.
    """
    dims = {**before, **given}
    if "kv_groups" in given:
        per_group = dims["heads"] // before["kv_groups"] if "heads" in given else before["heads"] // before["kv_groups"]
        dims["heads"] = per_group * dims["kv_groups"]
    return None if dims["heads"] % dims["kv_groups"] else dims


def legal_heads(checkpoint: Checkpoint, dims: Dims) -> bool:
    """Whether the family's configuration takes so many heads."""
    config = checkpoint.text_config
    return config.get("model_type") not in VALIDATES_HEADS or config["hidden_size"] % dims["heads"] == 0


def check_reached(candidates: Sequence[Candidate], target: Target, axes: Sequence[str]) -> None:
    """Refuse a target that nothing comes near.

    Raises:
        RecipeError: none fits; names the nearest.
    """
    if _ordered(candidates, target, axes):
        return
    wanted = target.wanted(candidates[0].amount(target.unit))
    nearest = min(candidates[1:], key=lambda c: abs(c.amount(target.unit) - wanted), default=None)
    hint = _describe(nearest, candidates[0], target.unit) if nearest else "nothing: no axis has a smaller legal size"
    raise RecipeError(
        f"no legal {' and '.join(axes)} come within {target.tolerance:.1%} of {target.unit} {wanted:,.0f}: "
        f"the nearest is {hint}; change the target, tolerance, round_to or axes"
    )


def splits(candidates: Sequence[Candidate], target: Target, axes: Sequence[str], most: int) -> list[Candidate]:
    """Candidates that fit, at most so many, evenly from the one whose later axes give least to the one where most."""
    best: dict[tuple[int, ...], Candidate] = {}  # sizes of the later axes -> the nearest to the target
    for candidate in _ordered(candidates, target, axes):
        best.setdefault(tuple(candidate.dims[axis] for axis in axes[1:]), candidate)
    found = [*best.values()]
    places = [round(i * (len(found) - 1) / max(1, most - 1)) for i in range(most)]
    return [found[place] for place in dict.fromkeys(places)] if found else []


def _ordered(candidates: Sequence[Candidate], target: Target, axes: Sequence[str]) -> list[Candidate]:
    """Those that fit, the best first."""
    source = candidates[0].amount(target.unit)
    wanted, slack = target.wanted(source), target.tolerance * source
    above = 0 if target.unit == "memory" else slack
    fitting = [c for c in candidates[1:] if -slack <= c.amount(target.unit) - wanted <= above]
    return sorted(fitting, key=lambda c: _cost(c, candidates[0].dims, axes, abs(c.amount(target.unit) - wanted)))


def _cost(candidate: Candidate, before: Dims, axes: Sequence[str], distance: float) -> tuple[float, ...]:
    given_up = [1 - candidate.dims[axis] / before[axis] for axis in reversed(axes[1:])]
    return (*given_up, distance)


def _describe(candidate: Candidate, source: Candidate, unit: str) -> str:
    change = candidate.amount(unit) / source.amount(unit) - 1
    dims = [f"{AXES[axis][0]} {size}" for axis, size in candidate.dims.items() if size != source.dims[axis]]
    return f"{candidate.amount(unit):,} ({change:+.1%}) with {', '.join(dims)}"


def exact_dims(checkpoint: Checkpoint, before: Dims, given: Dims) -> Candidate:
    """The candidate with dims named by the user.

    Raises:
        RecipeError: a dim that is not smaller, or that the model cannot have.
    """
    for axis, size in given.items():
        if not 0 < size <= before.get(axis, 0):
            raise RecipeError(f"{AXES[axis][0]} {size} is not between 1 and the source's {before.get(axis, 0)}")
    least = checkpoint.text_config.get("num_experts_per_tok", 1)
    if given.get("experts", least) < least:
        raise RecipeError(f"{given['experts']} experts are fewer than the {least} that each token takes")
    dims = complete(before, given)
    if dims and "heads" in given and dims["heads"] != given["heads"]:
        dims = None
    if dims is None or not legal_heads(checkpoint, dims):
        raise RecipeError(
            f"{given.get('heads', before['heads'])} heads over {given.get('kv_groups', before['kv_groups'])} key-value "
            f"heads and a hidden size of {checkpoint.text_config['hidden_size']} do not divide: choose another number"
        )
    if dims == dict(before):
        raise RecipeError("the target's dims are the source's own: nothing would be pruned")
    return Candidate(dims, *Sizes.of(checkpoint, before).count(dims))
