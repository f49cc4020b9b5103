"""What every stage's plan has in common: what it reads, what it will write down to the offsets, and how."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calibration import calibration_tokens
from compress.calibration_options import Calibration
from compress.checkpoint import Checkpoint
from compress.progress import Advance
from compress.tensor_file import TensorInfo, encode_header
from compress.writer import ShardPlan
from evals.samples import SampleSet

__all__ = ["LayerRow", "Place", "StagePlan", "planned_tensors"]


@dataclass(frozen=True)
class LayerRow:
    """What one module becomes; `shape` of its weight, or of one token's keys and values: heads of both by dimension."""

    name: str
    shape: tuple[int, int]
    becomes: str  # a format's name, or "16 bits"
    reason: str  # why it is left alone, "" if it is not
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class StagePlan:
    """A stage that is ready to run.

    source   what it reads: a real checkpoint, or for later stages the one the stage before will write
    result   what it will write, down to the offsets; its files do not exist yet
    memory   bytes it holds beside a few tensors: models that are trained
    write    fills the shards into a directory; returns what was found out on the way, for run.json
    candidates  what else was looked at when planning, a row of named cells each, the source first; may be empty
    decide   where the data decide what is done: finds the stage's options without a choice left, with which the run
             plans anew, and what run.json keeps of how; tells its progress in bytes of the source
    """

    name: str
    summary: str
    source: Checkpoint
    result: Checkpoint
    shards: ShardPlan
    layers: list[LayerRow]
    write: Callable[[Path, torch.device, Advance], dict[str, Any]]
    memory: int = 0
    candidates: Sequence[Mapping[str, str]] = ()
    decide: Callable[[torch.device, Advance], tuple[Any, list[dict[str, Any]]]] | None = None


@dataclass(frozen=True)
class Place:
    """Where stages write and what they must not learn from.

    directory          holds one folder per stage
    evaluated          the sample sets that calibration must not see
    trust_remote_code  run Python code that the checkpoint brings
    origin             what the first stage reads
    following          the options of the stage after the one that is planned
    """

    directory: Path
    max_shard_size: int
    evaluated: Sequence[SampleSet] = ()
    trust_remote_code: bool = False
    origin: Checkpoint | None = None
    following: Any = None

    def calibration_tokens(self, wanted: Calibration, source: Checkpoint) -> Tensor:
        """(N, T) int64: the texts that a stage asks for, apart from what is evaluated; raises as its namesake."""
        return calibration_tokens(
            source.path,
            documents=wanted.documents,
            problems=wanted.problems,
            size=(wanted.samples, wanted.length),
            evaluated=self.evaluated,
            trust_remote_code=self.trust_remote_code,
        )


def planned_tensors(shards: ShardPlan, directory: Path) -> dict[str, TensorInfo]:
    """Where the planned tensors will lie once they are written into `directory`."""
    tensors: dict[str, TensorInfo] = {}
    for filename, specs in shards.files.items():
        at = len(encode_header(specs))
        for name, spec in specs.items():
            tensors[name] = TensorInfo(spec, directory / filename, at)
            at += spec.nbytes
    return tensors
