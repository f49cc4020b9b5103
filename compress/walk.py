"""The layer walk: one decoder block in memory at a time, calibrated on what the quantized ones before it output.

    for block in walk(checkpoint, tokens):
        for group in block.groups(names):
            group.replace([f(weight, group.statistics) for weight in group.weights])

The walk knows no method. A group is the linears that read the same input, found by watching one sequence go through the
block: query, key and value; gate and up; each expert's. Groups come in the order of computation, and each sees the
inputs that the already replaced ones produce. With `reference=True` each block has a twin, the unquantized model's on
its own hidden states, which goes through the same passes: a method sees how far the prefix has drifted. Where layers
are gone, `reference` is the `Whole` model: a twin is then a run of its blocks.

Every expert of a mixture sees tokens: where the router sends it fewer than EXPERT_FLOOR of a batch, others, evenly
spaced, are shown to it as well, so that none is left uncalibrated. How many were meant for it is counted.

Hidden states of the calibration tokens are (N, T, D) in memory, or in a file when `spill` names a folder. Under
torchrun every rank passes its own share of the tokens, statistics are summed over ranks, and all ranks compute the same
weights. Left out: models whose blocks exchange more than hidden states.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compress.checkpoint import Checkpoint
from compress.errors import InputError
from compress.memory import release_freed
from compress.walk_block import BATCH_TOKENS, Block, Group, batches, rank_of
from compress.walk_model import Chain, SeparateExperts, Skeleton, skeleton

__all__ = ["Block", "Group", "Whole", "walk"]

DTYPE = torch.float32  # of weights and hidden states while they compute
NO_CALL: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of a chain, which keeps those of its blocks
EXPERT_FLOOR = 32  # tokens of each batch that every expert sees at least


@dataclass(frozen=True)
class Whole:
    """A reference with more layers: its checkpoint, and for every block of the walk the layers whose work it does."""

    checkpoint: Checkpoint
    spans: Sequence[Sequence[int]]


def walk(
    checkpoint: Checkpoint,
    tokens: Tensor,
    *,
    device: torch.device,
    reference: bool | Whole = False,
    spill: Path | None = None,
    trust_remote_code: bool = False,
) -> Iterator[Block]:
    """Yield every decoder block in order, on the outputs of the blocks as they were left.

    Args:
        checkpoint: the source.
        tokens: (N, T) int64 calibration tokens, all sequences of one length; the same on every rank.
        device: where blocks compute.
        reference: also keep the unquantized or the whole model's block and hidden states, as `Block.twin`.
        spill: a folder for the hidden states; None keeps them in memory.
        trust_remote_code: run Python code that the checkpoint brings.

    Raises:
        InputError: no calibration tokens, or fewer batches than ranks.
        CheckpointError: the model's blocks or their tensors are not found.
    """
    model = skeleton(checkpoint, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        hidden, calls = _embed(model, _share(tokens), device, spill)
    float_hidden = hidden.clone() if reference else None
    chain = None
    if isinstance(reference, Whole):
        chain = _chains(reference, tokens[:1], device, trust_remote_code=trust_remote_code)
    for index in range(len(model.blocks)):
        module = model.load(index, DTYPE, device, floor=EXPERT_FLOOR)
        block = _block(model, index, module, hidden, device, calls[index])
        if float_hidden is not None:
            twin, call = (chain(index), NO_CALL) if chain else (deepcopy(module), calls[index])
            block.twin = _block(model, index, twin, float_hidden, device, call)
        yield block
        block.finish()
        release_freed()


def _chains(whole: Whole, tokens: Tensor, device: torch.device, *, trust_remote_code: bool) -> Callable[[int], Chain]:
    """What loads the twin of a block."""
    model = skeleton(whole.checkpoint, trust_remote_code=trust_remote_code)
    with torch.no_grad():
        _, calls = next(model.record(tokens, DTYPE, device))
    return lambda index: Chain((model.load(i, DTYPE, device, floor=0), calls[i]) for i in whole.spans[index])


def _block(model: Skeleton, index: int, module: nn.Module, hidden: Tensor, device: torch.device, call: Any) -> Block:
    return Block(
        index=index,
        name=f"{model.prefix}.{index}",
        module=module,
        inputs=hidden,
        device=device,
        call=call,
        linears={
            model.names(index, name): part for name, part in module.named_modules() if isinstance(part, nn.Linear)
        },
        tensors={model.names(index, name): tensor for name, tensor in module.state_dict(keep_vars=True).items()},
        experts={
            model.names(index, f"{name}.0.gate_proj").rpartition(".0.")[0]: part  # named as what is inside them
            for name, part in module.named_modules()
            if isinstance(part, SeparateExperts)
        },
    )


def _embed(model: Skeleton, tokens: Tensor, device: torch.device, spill: Path | None) -> tuple[Tensor, list[Any]]:
    recorded = model.record(tokens, DTYPE, device)
    first, calls = next(recorded)
    hidden = _buffer((len(tokens), *first.shape[1:]), first.dtype, spill)
    hidden[0] = first[0]
    for at, (states, _) in enumerate(recorded, 1):
        hidden[at] = states[0]
    return hidden, calls


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, spill: Path | None) -> Tensor:
    if spill is None:
        return torch.empty(shape, dtype=dtype)
    size = torch.Size(shape).numel()
    return torch.from_file(str(spill / "hidden_states.bin"), shared=True, size=size, dtype=dtype).reshape(shape)


def _share(tokens: Tensor) -> Tensor:
    """This rank's sequences: whole batches, so that sums over ranks have the terms of a single process."""
    if not len(tokens):
        raise InputError("there are no calibration tokens: give calibration data or use method rtn")
    if not dist.is_initialized():
        return tokens
    rank, ranks = rank_of()
    shares = batches(tokens)
    if len(shares) < ranks:  # on all ranks alike, so that none waits for one that has left
        raise InputError(
            f"the calibration tokens make {len(shares)} batches of {BATCH_TOKENS}, fewer than the {ranks} processes: "
            "give more samples, or start fewer processes"
        )
    return torch.cat(shares[rank::ranks])
