"""The training loop: a student learns from its teacher, over any number of ranks, and can be killed at any step.

Our own and not a trainer's: what matters here is that the loss is divided by all learnt tokens of an optimizer step,
whatever the micro-batches and ranks (a mean of means weighs tokens unequally; trl#4719), that a continued run goes
on bit by bit, and that a run whose loss is not a number stops before it harms the weights. accelerate brings ranks,
sharding and mixed precision; there is no data loader, since rows are a function of the step.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import Diverged, InputError
from distill.data import Data
from distill.losses import Loss
from distill.pair import Recorded, Student, Teacher, Teaches
from distill.schedule import Schedule, learning_rate
from distill.state import Progress, restore, save, save_best

__all__ = ["Stop", "train"]


@dataclass(frozen=True)
class Stop:
    """When to look at the rows held out, and after how many looks without a better one to end."""

    evaluate_every: int = 25
    patience: int = 4


@dataclass(frozen=True)
class _Run:
    """What all parts of the loop share."""

    accelerator: Accelerator
    model: torch.nn.Module  # the student as prepared
    student: Student
    teacher: Teaches
    optimizer: torch.optim.Optimizer
    data: Data
    schedule: Schedule
    loss: Loss
    folder: Path


def train(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    data: Data,
    plan: tuple[Loss, Schedule, Stop],
    folder: Path,
    told: Callable[[Progress, int], None] = lambda progress, tokens: None,
) -> Progress:
    """Train; the best state is then in `folder`, from where a run with the same arguments goes on.

    Args:
        student: float32; it is left in its last state, not its best.
        teacher: None where the rows bring what it said.
        data: the same on every rank.
        told: called after each update with the progress and the tokens learnt since the call before.

    Raises:
        Diverged: a loss or gradient that is not finite; the states saved before it are kept.
        InputError: a batch that the ranks cannot share evenly.
    """
    loss, schedule, stop = plan
    run = _prepare(student, Teacher(teacher) if teacher else Recorded(), data, (loss, schedule), folder)
    progress = restore(run.accelerator, folder)
    if not progress.curve:
        _evaluate(run, progress)
    while progress.step < schedule.steps and progress.since_best < stop.patience:
        tokens = _update(run, progress)
        if progress.step % stop.evaluate_every == 0 or progress.step == schedule.steps:
            _evaluate(run, progress)
        told(progress, tokens)
    run.accelerator.end_training()
    return progress


def _prepare(student: PreTrainedModel, teacher: Teaches, data: Data, plan: tuple[Loss, Schedule], folder: Path) -> _Run:
    loss, schedule = plan
    device = student.device
    accelerator = Accelerator(mixed_precision=_precision(schedule, device), cpu=device.type == "cpu")
    if schedule.batch % accelerator.num_processes:
        raise InputError(
            f"training.batch is {schedule.batch}, which {accelerator.num_processes} processes cannot share evenly"
        )
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.state.fsdp_plugin.fsdp_version != 2:
        raise InputError("accelerate is set up for FSDP 1: say fsdp_version: 2 in its file of settings")
    if schedule.gradient_checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
    wrapped = Student(student.eval()).train()  # type: ignore[no-untyped-call]
    adam = torch.optim.AdamW(
        wrapped.parameters(), schedule.learning_rate, betas=(0.9, 0.95), weight_decay=schedule.weight_decay
    )
    model, optimizer = accelerator.prepare(wrapped, adam)
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tells at every save of tied weights
    folder.mkdir(parents=True, exist_ok=True)
    return _Run(accelerator, model, wrapped, teacher, optimizer, data, schedule, loss, folder)


def _precision(schedule: Schedule, device: torch.device) -> str:
    """accelerate's word for it."""
    automatic = "fp32" if device.type == "cpu" else "bf16"
    chosen = automatic if schedule.precision == "auto" else schedule.precision
    return "no" if chosen == "fp32" else chosen


def _update(run: _Run, progress: Progress) -> int:
    """One optimizer step; returns the tokens learnt over all ranks."""
    start = progress.step * run.schedule.batch
    places = run.data.order[start : start + run.schedule.batch]
    tokens = run.data.train[places].tokens  # of all ranks
    total = _accumulate(run, places[run.accelerator.process_index :: run.accelerator.num_processes], tokens)
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), run.schedule.clip)
    _check_finite(run, progress, total, float(norm))
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.schedule, progress.step)
    run.optimizer.step()
    run.optimizer.zero_grad()
    progress.step += 1
    progress.losses.append(total)
    return tokens


def _accumulate(run: _Run, mine: Tensor, tokens: int) -> float:
    """Add this rank's gradients of a step, and all ranks' together; the loss in nats per token over all ranks."""
    ranks = run.accelerator.num_processes
    parts = torch.split(mine, run.schedule.micro_batch)
    sums = torch.zeros((), device=run.accelerator.device)
    for i, part in enumerate(parts):
        rows = run.data.train[part].to(run.accelerator.device)
        with contextlib.nullcontext() if i + 1 == len(parts) else run.accelerator.no_sync(run.model):
            loss = run.model(rows, run.teacher, run.loss) / max(1, tokens)
            run.accelerator.backward(loss * ranks)  # ranks' gradients are averaged
            sums += loss.detach()
    return float(run.accelerator.reduce(sums, "sum"))


def _check_finite(run: _Run, progress: Progress, loss: float, norm: float) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    raise Diverged(
        f"the loss of step {progress.step + 1} is {loss} and its gradient's norm {norm}: lower training.learning_rate, "
        f"{run.schedule.learning_rate:g} now; the best weights, of step {progress.best['step']:.0f}, are kept in "
        f"{run.folder}"
    )


def _evaluate(run: _Run, progress: Progress) -> None:
    """Measure the rows held out, on every rank alike; keep the weights if they are the best so far, and the state."""
    started = time.monotonic()
    run.model.eval()
    found = [run.student.divergence(run.data.held_out, run.teacher, run.schedule.micro_batch)]
    (kl,) = broadcast_object_list(found)  # the first rank's: GPUs may differ in the last bit, and ranks must go one way
    run.model.train()
    if not math.isfinite(kl):
        raise Diverged(f"the KL on the rows held out is {kl} at step {progress.step}: lower training.learning_rate")
    progress.curve.append({"step": progress.step, "kl": kl, "seconds": round(time.monotonic() - started, 2)})
    if not progress.best or kl < progress.best["kl"]:
        progress.best = {"step": progress.step, "kl": kl}
        tensors = run.accelerator.get_state_dict(run.model)
        if run.accelerator.is_main_process:
            own = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
            save_best(run.folder, own, progress.step)
    if progress.step:
        save(run.accelerator, run.folder, progress)
