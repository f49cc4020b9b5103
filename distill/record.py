"""A teacher asked beforehand for its k likeliest next tokens everywhere, so that training needs no teacher.

Written to files that the rows then bring along, mapped into memory and not read into it: 8 bytes per token and id (k =
64: 516 bytes per token). The folder's name is a hash of everything the answers depend on, the rows themselves included,
and which rows are done is kept beside them, so that a run that was killed goes on.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from distill.data import Rows
from distill.losses import LOGITS, TopK
from distill.pair import Teacher

__all__ = ["Asked", "record"]


@dataclass(frozen=True)
class Asked:
    """Of whom (a hash of the teacher's files), for how many ids of a vocabulary, and at which temperature."""

    teacher: str
    k: int
    vocabulary: int
    temperature: float = 1.0


def record(
    teacher: Teacher, rows: Rows, asked: Asked, folder: Path, told: Callable[[int], None] = lambda rows: None
) -> Rows:
    """The rows with the teacher's answers, those that an earlier run has not left behind made now.

    Args:
        folder: holds a folder of answers for each hash.
        told: called with the number of rows done since the call before.

    Raises:
        OSError: the disk is full.
    """
    place = folder / f"answers-{_hash(rows, asked)}"
    place.mkdir(parents=True, exist_ok=True)
    count, length = rows.ids.shape
    width = asked.k + (asked.k < asked.vocabulary)
    ids = _mapped(place / "ids.bin", (count, length, asked.k), torch.int32)
    log_p = _mapped(place / "log_p.bin", (count, length, width), torch.float32)
    done = _mapped(place / "done.bin", (count,), torch.uint8)
    missing = (done == 0).nonzero().flatten().tolist()
    told(count - len(missing))
    for row in missing:
        ids[row], log_p[row] = _answers(teacher, rows.ids[row], asked)
        done[row] = 1
        told(1)
    return replace(rows, top=TopK(ids, log_p, asked.vocabulary))


def _hash(rows: Rows, asked: Asked) -> str:
    digest = hashlib.sha256(repr((asked, rows.ids.shape)).encode())
    digest.update(rows.ids.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    with path.open("ab") as file:  # space is claimed here: where a mapped file runs out of it, the process dies
        os.posix_fallocate(file.fileno(), 0, max(1, size * dtype.itemsize))
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).reshape(shape)


@torch.no_grad()
def _answers(teacher: Teacher, ids: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """(T, k) ids and (T, k + 1) log-probabilities of a row (T,)."""
    states = teacher.states(ids[None].to(teacher.model.device))[0]
    parts = [
        TopK.of(teacher.head.logits(part)[:, : asked.vocabulary], asked.k, asked.temperature)
        for part in torch.split(states, max(1, LOGITS // asked.vocabulary))
    ]
    return torch.cat([part.ids for part in parts]).cpu(), torch.cat([part.log_p for part in parts]).cpu()
