"""Width or depth: the same target can be met by several splits, and which loses least is measured, not known.

Every split is pruned as the stage would do it, on fewer calibration tokens, and judged by its divergence from the
source on text that it was not calibrated on; the stage then makes the best one again on all its tokens. What has been
measured goes to a journal, so a killed search goes on, and the order in which layers go is found once for all.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.progress import Advance, say
from compress.walk_journal import Journal
from compress.walk_model import skeleton
from compress.writer import write_json
from prune.plan import PrunePlan
from prune.run import How, digest, run_prune
from prune.streamed import Streamed, divergence

__all__ = ["Scored", "search_splits"]


@dataclass(frozen=True)
class Scored:
    """A split with KL(source ‖ split), nats per token of held-out text."""

    plan: PrunePlan
    kl: float


def search_splits(
    plans: Sequence[PrunePlan], how: How, held_out: Tensor, folder: Path, device: torch.device, advance: Advance
) -> list[Scored]:
    """Score every plan, the best first.

    Args:
        plans: of one source.
        how: to prune them; its journal also keeps the order of the layers for the stage itself.
        held_out: (N, T) int64 tokens.
        folder: for checkpoints that exist while they are judged, and for what was found.
        advance: called with source bytes as they are done, those of every plan.

    Raises:
        Refused: as pruning, or a divergence that is not finite.
    """
    journal = Journal(folder / digest(plans[0].checkpoint, how, held_out), writes=True)
    judge = _Judge(plans[0].checkpoint, held_out, device, trust_remote_code=how.trust_remote_code)
    found = []
    for plan in sorted(plans, key=lambda plan: plan.after["layers"]):  # the deepest cut knows the order for all
        part = "-".join(f"{axis}{size}" for axis, size in plan.after.items())
        saved = journal.load(part)
        if saved is None:
            kl = judge.score(plan, how, folder / part, advance)
            journal.save(part, {}, {"kl": kl})
        found.append(Scored(plan, kl if saved is None else saved[1]["kl"]))
        say(f"{plan.dims()}: KL {found[-1].kl:.4f}")
    return sorted(found, key=lambda scored: scored.kl)


class _Judge:
    """The source on the held-out tokens, run when it is first asked for."""

    def __init__(self, source: Checkpoint, held_out: Tensor, device: torch.device, *, trust_remote_code: bool) -> None:
        self.source, self.held_out, self.device = source, held_out, device
        self.trust_remote_code = trust_remote_code
        self.reference: tuple[Tensor, Tensor] | None = None

    def score(self, plan: PrunePlan, how: How, directory: Path, advance: Advance) -> float:
        """Prune into a directory that is gone afterwards."""
        self.reference = self.reference or self._run(self.source)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        run_prune(plan, how, directory, self.device, advance)
        write_json(directory / "config.json", plan.config)
        (kl,) = divergence(self.reference, [self._run(Checkpoint.open(directory))])
        shutil.rmtree(directory)
        return kl

    def _run(self, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
        model = Streamed(skeleton(checkpoint, trust_remote_code=self.trust_remote_code), self.held_out, self.device)
        return model.final(), model.head
