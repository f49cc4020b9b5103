"""Run under several processes: train as `test_loop` does and write down the curve, the weights and who held them.

With SHARDED=1 accelerate shards the student by FSDP2. `accelerate launch` comes to that on accelerators only: under
cpu=True an AcceleratorState passes over fsdp_plugin and ACCELERATE_USE_FSDP, and replicates (accelerate 1.15). No
argument, variable or file of settings changes that, so its state is told; what follows is what GPUs do, over gloo.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from distill.loop import Stop, train
from distill.losses import Loss
from distill.schedule import Schedule
from distill.state import read_best
from tests.distill.pairs import build_rows, build_student, build_teacher


def shard() -> None:
    """What `accelerate launch` with fsdp_version 2 comes to."""
    state = Accelerator(cpu=True).state
    for told in (PartialState(), state):
        told.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("SHARDED"):
        shard()
    folder = Path(sys.argv[1])
    schedule = Schedule(**json.loads(sys.argv[2]))
    student = build_student()
    progress = train(student, build_teacher(), build_rows(4, 8), (Loss(), schedule, Stop(4, 9)), folder)
    if os.environ["RANK"] == "0":
        found = {
            "losses": progress.losses,
            "kl": [entry["kl"] for entry in progress.curve],
            "weights": sum(float(tensor.abs().sum()) for tensor in read_best(folder).values()),
            "sharded": any(isinstance(parameter, DTensor) for parameter in student.parameters()),
        }
        (folder / "found.json").write_text(json.dumps(found))
