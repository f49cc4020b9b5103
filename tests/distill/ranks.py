"""Run under several processes: train as `test_loop` does and write down the losses and the weights."""

import json
import os
import sys
from pathlib import Path

import torch

from distill.loop import Stop, train
from distill.losses import Loss
from distill.schedule import Schedule
from distill.state import read_best
from tests.distill.pairs import build_rows, build_student, build_teacher

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    schedule = Schedule(**json.loads(sys.argv[2]))
    progress = train(build_student(), build_teacher(), build_rows(4, 8), (Loss(), schedule, Stop(4, 9)), folder)
    if os.environ["RANK"] == "0":
        found = {
            "losses": progress.losses,
            "kl": [entry["kl"] for entry in progress.curve],
            "weights": sum(float(tensor.abs().sum()) for tensor in read_best(folder).values()),
        }
        (folder / "found.json").write_text(json.dumps(found))
