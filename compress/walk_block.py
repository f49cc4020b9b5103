"""A decoder block during the walk: the groups of its linears, their inputs' statistics, and its outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compress.errors import InputError
from compress.walk_model import SeparateExperts, run_block
from compress.walk_pause import PausedPass
from compress.walk_statistics import Statistics

__all__ = ["Block", "Group", "batches", "check_finite", "hooked", "rank_of"]

BATCH_TOKENS = 2048  # tokens that go through a block at once

Quantizer = Callable[[Tensor], Tensor]


@dataclass
class Group:
    """Linears that read the same input.

    names       full module names, as in the checkpoint
    linears     the modules; weights are (O, I)
    statistics  of the input, before `rounding`
    rounding    what an engine with quantized activations does to the input; None: nothing
    """

    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]
    statistics: Statistics
    rounding: Quantizer | None = None

    @property
    def weights(self) -> list[Tensor]:
        """Float32 weights (O, I)."""
        return [linear.weight.detach().float() for linear in self.linears]

    def replace(self, weights: Sequence[Tensor]) -> None:
        """Put new weights (O, I) in place; the block computes with them from here on."""
        for linear, weight in zip(self.linears, weights, strict=True):
            linear.weight.data.copy_(weight)


@dataclass
class Block:
    """One decoder block with its weights, and the hidden states that enter it.

    index, name  its place, and the checkpoint's name, e.g. "model.layers.3"
    module       the block; its parameters may be changed in place
    inputs       (N, T, D), where they are kept; replaced by the outputs when the walk goes on
    linears      every linear of the block by the checkpoint's name
    tensors      every parameter of the block by the checkpoint's name
    experts      the modules of separate experts by the checkpoint's name
    twin         when the walk was asked for it: the same block of the unquantized model, or the run of blocks of the
                 whole one, on its own hidden states
    """

    index: int
    name: str
    module: nn.Module
    inputs: Tensor
    device: torch.device
    call: tuple[tuple[Any, ...], dict[str, Any]]  # what the block is called with besides hidden states
    linears: dict[str, nn.Linear]
    tensors: dict[str, Tensor]
    experts: dict[str, SeparateExperts]
    twin: "Block | None" = None
    finished: bool = False
    layouts: dict[tuple[str, ...], list[tuple[str, ...]]] = field(default_factory=dict)  # by the names asked for

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the block on hidden states (n, T, D)."""
        return run_block(self.module, self.call, hidden.to(self.device))

    def layout(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """`names` partitioned into groups, in the order in which they compute; unreached ones are left out."""
        key = tuple(names)
        if key not in self.layouts:
            seen: dict[int, tuple[Tensor, list[str]]] = {}  # keeps each input alive, so that no address is used twice
            with hooked({self.linears[name]: partial(_note, seen, name) for name in names}), torch.no_grad():
                self.forward(self.inputs[:1])
            self.layouts[key] = [tuple(group) for _, group in seen.values()]
        return self.layouts[key]

    def observe(self, names: Sequence[str], *, first: bool = False) -> list[Group]:
        """The groups of `names` as the block is now, statistics of all batches or the first alone; changes nothing."""
        groups, seen = self._groups(names), batches(self.inputs)
        if first:  # the first rank has it
            seen = seen[:1] if rank_of()[0] == 0 else []
        with hooked({group.linears[0]: partial(_count, group) for group in groups}), torch.no_grad():
            for batch in seen:
                self.forward(batch)
        for group in groups:
            _complete(group)
        return groups

    def groups(self, names: Sequence[str], factors: Mapping[str, Tensor] = MappingProxyType({})) -> Iterator[Group]:
        """Each group of `names` once its inputs are final; replace its weights before taking the next.

        One forward pass over all tokens, which leaves the block's outputs behind; and one of the twin, if there is one.

        Args:
            factors: by the first name of a group, (I,) what its input was divided by since the block was loaded.

        Raises:
            InputError: a calibration activation is not finite.
        """
        groups = self._groups(names)
        for experts in self.experts.values():
            experts.routed = [0] * len(experts.routed)  # the looks before this pass do not count
        lanes = [_Passes(self, groups)]
        if self.twin is not None:
            lanes.append(_Passes(self.twin, self.twin.matching(groups)))
        with ExitStack() as stack:
            for lane in lanes:
                stack.enter_context(lane)
            for group in groups:
                waiting = [lane.waiting_at(group) for lane in lanes]
                factor = factors.get(group.names[0])
                for each, *exact in _aligned(waiting):
                    group.statistics.add(each, *(x if factor is None else x / factor for x in exact))
                _complete(group)
                yield group
                for lane, paused in zip(lanes, waiting, strict=True):
                    for one in paused:
                        lane.resume(one)

    def expert_tokens(self) -> dict[str, int]:
        """How many tokens of all ranks the router has sent to each expert in the pass of `groups`, by its name."""
        counts = {f"{name}.{i}": n for name, experts in self.experts.items() for i, n in enumerate(experts.routed)}
        totals = torch.tensor([*counts.values()], device=self.device)
        if dist.is_initialized() and counts:
            dist.all_reduce(totals)
        return dict(zip(counts, totals.tolist(), strict=True))

    def matching(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of the same linears here, but for experts, whose tokens differ when the routers' inputs do."""
        outside = [group for group in groups if not any(group.names[0].startswith(f"{name}.") for name in self.experts)]
        return [replace(group, linears=tuple(self.linears[name] for name in group.names)) for group in outside]

    def round_inputs(self, names: Sequence[str], rounding: Quantizer) -> None:
        """From here on these linears compute on rounded inputs; for blocks that are only run, not calibrated."""
        for name in names:
            self.linears[name].register_forward_pre_hook(lambda _, args: (rounding(args[0]),))

    def rewind(self, inputs: Tensor) -> None:
        """Put the inputs back that `groups` has replaced by outputs; the twin keeps its outputs."""
        self.inputs.copy_(inputs)
        self.finished = False

    def finish(self) -> None:
        """Replace the inputs by the outputs of the block as it is now, unless `groups` has done so; the twin's too."""
        if not self.finished:
            with torch.no_grad():
                for batch in batches(self.inputs):
                    batch.copy_(self.forward(batch))
        self.finished = True
        if self.twin is not None:
            self.twin.finish()

    def _groups(self, names: Sequence[str]) -> list[Group]:
        return [
            Group(group, tuple(self.linears[name] for name in group), self._statistics(group[0]))
            for group in self.layout(names)
        ]

    def _statistics(self, name: str) -> Statistics:
        return Statistics(self.linears[name].in_features, self.device)


def batches(hidden: Tensor) -> list[Tensor]:
    return list(torch.split(hidden, max(BATCH_TOKENS // hidden.shape[1], 1)))


def rank_of() -> tuple[int, int]:
    """This process's rank and how many there are; ranks hold the batches of all in turn."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class _Passes:
    """All batches of a block, each a pass that pauses at the first linear of every group."""

    def __init__(self, block: Block, groups: Sequence[Group]) -> None:
        self.block, self.groups = block, groups
        self.batches = batches(block.inputs)
        self.passes = [PausedPass(partial(block.forward, batch)) for batch in self.batches]
        self.running = self.passes[0]
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        hooks = {linear: partial(self._enter, group) for group in self.groups for linear in group.linears}
        with ExitStack() as stack:  # undone if a pass fails before it pauses
            stack.enter_context(hooked(hooks))
            stack.callback(self._abandon)
            for each in self.passes:
                self.resume(each)
            self._hooks = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self.block.finished = all(each.ended for each in self.passes)
        self._hooks.close()

    def _abandon(self) -> None:
        with torch.no_grad():
            for each in self.passes:
                each.abandon()

    def waiting_at(self, group: Group) -> list[PausedPass]:
        return [each for each in self.passes if each.at == group.names]

    def resume(self, each: PausedPass) -> None:
        """Let one pass run on; when it ends, its outputs take the place of its inputs."""
        self.running = each
        with torch.no_grad():
            each.resume()
        if each.ended:
            self.batches[self.passes.index(each)].copy_(each.take())

    def _enter(self, group: Group, linear: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hook of every linear: pause at the first of the group, then round the input."""
        if linear is group.linears[0]:
            self.running.pause(group.names, args[0])
        return (group.rounding(args[0]),) if group.rounding else args


def _aligned(waiting: Sequence[Sequence[PausedPass]]) -> list[tuple[Tensor, ...]]:
    """What the passes of each lane show, batch by batch; lanes that do not stop here are left out."""
    return list(zip(*([each.shown() for each in lane] for lane in waiting if lane), strict=True))


def _note(seen: dict[int, tuple[Tensor, list[str]]], name: str, linear: nn.Module, args: tuple[Tensor, ...]) -> None:
    seen.setdefault(id(args[0]), (args[0], []))[1].append(name)


def _count(group: Group, linear: nn.Module, args: tuple[Tensor, ...]) -> None:
    group.statistics.add(args[0])


def _complete(group: Group) -> None:
    group.statistics.all_reduce()
    check_finite(group.names[0], group.statistics.absmax)


def check_finite(name: str, absmax: Tensor) -> None:
    """Raise InputError unless the largest magnitudes of a linear's inputs are numbers."""
    if not bool(absmax.isfinite().all()):
        raise InputError(f"a calibration activation at {name} is NaN or infinite: check the source model")


@contextmanager
def hooked(hooks: Mapping[nn.Linear, Callable[..., Any]]) -> Iterator[None]:
    """Forward pre-hooks, gone afterwards."""
    handles = [linear.register_forward_pre_hook(hook, prepend=True) for linear, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
