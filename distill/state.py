"""Where a training run stands, on disk: a run that is killed goes on from there, and the best weights are never lost.

best.safetensors   the student with the lowest divergence on the rows held out, and in its header its step
state-000050/      weights, moments and random states as accelerate writes them, and progress.json; renamed into
                   place whole, then the one before is removed
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress.writer import write_json

__all__ = ["Progress", "read_best", "restore", "save", "save_best"]

BEST = "best.safetensors"
PROGRESS = "progress.json"


@dataclass
class Progress:
    """What has happened.

    step     updates done
    losses   of each update, nats per token
    curve    one entry per evaluation: step, kl on the rows held out (nats per token), seconds since the start
    best     the step and kl of the best state
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)

    @property
    def since_best(self) -> int:
        """Evaluations after the best one."""
        return sum(entry["step"] > self.best["step"] for entry in self.curve)


def save(accelerator: Accelerator, folder: Path, progress: Progress) -> None:
    """Write the whole state; called by every rank."""
    target = folder / f"state-{progress.step:06}"
    partial = target.with_suffix(".partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()  # each rank writes a random state of its own, the sharded ones last of all
    if accelerator.is_main_process:
        write_json(partial / PROGRESS, asdict(progress))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in folder.glob("state-*"):
            if old != target:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def restore(accelerator: Accelerator, folder: Path) -> Progress:
    """Read the newest state into what the accelerator has prepared; a fresh start where there is none."""
    states = sorted(path for path in folder.glob("state-*") if not path.suffix)
    if not states:
        return Progress()
    accelerator.load_state(str(states[-1]))
    return Progress(**json.loads((states[-1] / PROGRESS).read_text(encoding="utf-8")))


def save_best(folder: Path, tensors: dict[str, Tensor], step: int) -> None:
    """Replace the best weights, durably and whole."""
    partial = folder / f"{BEST}.partial"
    whole = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}  # tied tensors share memory
    save_file(whole, partial, metadata={"step": str(step)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(folder / BEST)


def read_best(folder: Path) -> dict[str, Tensor]:
    """The best weights by the model's own names."""
    with safe_open(folder / BEST, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
