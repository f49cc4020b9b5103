"""Calibrated quantization of a checkpoint: the layer walk with a method on every group of linears.

Block by block: channel factors are folded, each group is solved on its true inputs, and what is to be stored goes to
the journal. When all blocks are there, the planned shards are written from the journal and, for what no method touched,
from the source. Linears outside the decoder blocks are not reached by the walk; see `solve_alone`.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compress.errors import Refused
from compress.progress import Advance
from compress.tensor_file import read_tensor
from compress.walk import walk
from compress.walk_journal import Journal
from compress.writer import ShardWriter
from quant.calibrated_block import quantize_block, restore_block, solve_alone
from quant.methods import ITERATIONS, METHODS, Method
from quant.plan import QuantizePlan

__all__ = ["Calibration", "run_calibrated"]


@dataclass(frozen=True)
class Calibration:
    """How to calibrate.

    method             a key of METHODS
    tokens             (N, T) int64, the same on every rank
    journal            a folder for finished blocks, kept if the run is killed, removed when it is done
    iterations         of learned rounding, for methods that have it
    trust_remote_code  run Python code that the checkpoint brings
    """

    method: str
    tokens: Tensor
    journal: Path
    iterations: int = ITERATIONS
    trust_remote_code: bool = False


def run_calibrated(
    plan: QuantizePlan, calibration: Calibration, directory: Path, device: torch.device, advance: Advance
) -> list[dict[str, Any]]:
    """Write the planned shards into `directory`; what was done to each layer, as plain data.

    Args:
        advance: called with source bytes as they are done.

    Raises:
        InputError: no calibration tokens, or an activation that is not finite.
        Refused: a weight that is not finite, or a layer that cannot be quantized.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    journal = Journal(calibration.journal / _key(plan, calibration), writes=writes)
    reports = [*_walk(plan, calibration, journal, device, advance)]
    walked = {name for report in reports for name in report["layers"]}
    reports += _outside(plan, walked, METHODS[calibration.method], journal, device)
    if dist.is_initialized():
        dist.barrier()  # a rank may still read the journal, which goes now
    if writes:
        _write(plan, journal, directory)
        shutil.rmtree(calibration.journal)
    return reports


def _walk(
    plan: QuantizePlan, calibration: Calibration, journal: Journal, device: torch.device, advance: Advance
) -> Iterator[dict[str, Any]]:
    assignments = {assignment.module.name: assignment for assignment in plan.quantized}
    method, code = METHODS[calibration.method], calibration.trust_remote_code
    for block in walk(
        plan.checkpoint, calibration.tokens, device=device, reference=method.reference, trust_remote_code=code
    ):
        mine = {name: assignments[name] for name in block.linears if name in assignments}
        saved = journal.load(block.name)
        if saved is None:
            tensors, report = quantize_block(block, mine, method, iterations=calibration.iterations)
            journal.save(block.name, tensors, report)
        else:
            report = saved[1]
            restore_block(block, mine, saved[0])
        advance(sum(assignment.module.weight.nbytes for assignment in mine.values()))
        yield report


def _outside(
    plan: QuantizePlan, walked: set[str], method: Method, journal: Journal, device: torch.device
) -> Iterator[dict[str, Any]]:
    for assignment in plan.quantized:
        name = assignment.module.name
        if name in walked:
            continue
        saved = journal.load(name)
        if saved is None:
            weight = read_tensor(assignment.module.weight).to(device)
            tensors, report = solve_alone(assignment, weight, method)
            journal.save(name, tensors, report)
        yield saved[1] if saved else report


def _write(plan: QuantizePlan, journal: Journal, directory: Path) -> None:
    """The planned shards: what the journal holds, and the rest as it is in the source."""
    with ShardWriter(directory, plan.shards) as writer:
        done: set[str] = set()
        for part in journal.parts():
            for name, tensor in journal.tensors(part):
                writer.append(name, tensor.to(plan.outputs[name].dtype))
                done.add(name)
        for name, info in plan.copies.items():
            if name not in done:
                writer.append(name, _finite(name, read_tensor(info)).to(plan.outputs[name].dtype))


def _finite(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(tensor.isfinite().all()):
        raise Refused(f"tensor {name!r} holds NaN or infinite values: the source checkpoint is damaged")
    return tensor


def _key(plan: QuantizePlan, calibration: Calibration) -> str:
    """Names what the results depend on: source, formats, method and calibration tokens."""
    tokens = hashlib.sha256(calibration.tokens.contiguous().numpy().tobytes()).hexdigest()
    formats = {a.module.name: [a.fmt.name, dict(a.fmt.options)] for a in plan.quantized if a.fmt}
    stand = [(str(info.path), info.path.stat().st_mtime_ns) for info in plan.checkpoint.tensors.values()]
    whole = [calibration.method, calibration.iterations, tokens, list(calibration.tokens.shape), formats, stand]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]
