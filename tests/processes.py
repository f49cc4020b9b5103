"""Processes as torchrun starts them, for tests that do without its own."""

import os
import socket
import subprocess
import sys


def start_ranks(count: int, *words: str, **settings: str) -> list["subprocess.Popen[str]"]:
    """Run `python -m WORDS` as every rank of `count`, on the CPU, with more of the environment set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""} | settings
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", *words],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
