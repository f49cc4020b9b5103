"""A warm start: each block of the student learns, alone, to turn what enters the teacher's block into what leaves it.

Blocks are trained one after the other while the teacher is walked, so one block of each side is in memory and no block
waits for another's mistakes to be mended (blockwise local distillation, as in Puzzle, arXiv:2411.19146). What is
minimised is the squared error of each token over the square of its target,

    mean over tokens of  ‖y − ŷ‖² / ‖y‖²

because the norm in front of the next block divides a token by its size: an error counts by its direction, and the few
tokens of enormous norm that small models make count as any other. Left out: students with other layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from compress.checkpoint import Checkpoint
from compress.errors import Diverged
from compress.walk import Block, walk
from compress.walk_journal import Journal
from compress.walk_model import Skeleton, run_block, skeleton

__all__ = ["WarmUp", "warm_blocks"]


@dataclass(frozen=True)
class WarmUp:
    """`steps` of Adam on each block, with `batch` sequences at a time, the rate falling linearly to zero."""

    steps: int
    batch: int
    learning_rate: float
    trust_remote_code: bool = False


def warm_blocks(
    student: Checkpoint,
    teacher: Checkpoint,
    tokens: Tensor,
    plan: WarmUp,
    journal: Journal,
    where: tuple[torch.device, Callable[[int], None]],
) -> list[tuple[float, float]]:
    """Train every block; the journal then holds its tensors (float32) under the names of the checkpoint.

    Args:
        student, teacher: with equally many layers of one hidden size.
        tokens: (N, T) int64.
        journal: blocks that are there already are not trained again.
        where: the device, and what is called with a block's number when it is done.

    Returns:
        The relative error of each block on the first batch before and after.

    Raises:
        Diverged: an error that is not finite.
    """
    device, told = where
    ours = skeleton(student, trust_remote_code=plan.trust_remote_code)
    _, calls = next(ours.record(tokens[:1], torch.float32, device))
    found = []
    for block in walk(teacher, tokens, device=device, trust_remote_code=plan.trust_remote_code):
        saved = journal.load(block.name)
        if saved is None:
            module = ours.load(block.index, torch.float32, device, floor=0)
            errors = _train(partial(run_block, module, calls[block.index]), module, block, plan)
            journal.save(block.name, _tensors(ours, block.index, module), {"errors": errors})
        found.append(errors if saved is None else tuple(saved[1]["errors"]))
        told(block.index)
    return found


def _train(student: Callable[[Tensor], Tensor], module: nn.Module, block: Block, plan: WarmUp) -> tuple[float, float]:
    """Move the module's weights; the error on the first batch before and after."""
    weights = [parameter.requires_grad_(True) for parameter in module.parameters()]
    adam = torch.optim.Adam(weights, plan.learning_rate, betas=(0.9, 0.95))
    parts = torch.split(block.inputs, plan.batch)

    def error(part: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = block.forward(part)
        off = (student(part.to(block.device)) - wanted).square().sum(-1)
        return (off / wanted.square().sum(-1)).mean()

    with torch.no_grad():
        before = float(error(parts[0]))
    for step in range(plan.steps):
        loss = error(parts[step % len(parts)])
        if not bool(loss.isfinite()):
            raise Diverged(f"warm start: the error of {block.name} is {loss.item()}: lower warm_start.learning_rate")
        adam.param_groups[0]["lr"] = plan.learning_rate * (1 - step / plan.steps)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
    module.requires_grad_(False)
    with torch.no_grad():
        return before, float(error(parts[0]))


def _tensors(model: Skeleton, index: int, module: nn.Module) -> dict[str, Tensor]:
    return {model.names(index, name): tensor for name, tensor in module.state_dict().items()}
