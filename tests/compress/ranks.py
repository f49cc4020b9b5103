"""Run under several processes: work for all of them, twice, or work that the second process fails at."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from compress.errors import CompressError, InputError
from compress.ranks import among_ranks, helped


def add() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"{total.item():.0f} of us")


def fail() -> None:
    raise ValueError("no")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load(case: str) -> Callable[[], None]:
    if case == "loading":
        raise InputError("the second has no model")
    return {"working": fail, "killed": die}.get(case, add)


def run(case: str, folder: Path) -> int:
    for _ in range(2):
        with helped(partial(load, case), folder, torch.device("cpu")):
            add()
    return 3


if __name__ == "__main__":
    try:
        sys.exit(among_ranks(partial(run, sys.argv[1], Path(sys.argv[2]))))
    except CompressError as error:
        print(error)
        sys.exit(error.exit_code)
