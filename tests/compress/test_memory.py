"""Freed memory goes back to the system."""

import sys
from pathlib import Path

import pytest
import torch

from compress.memory import release_freed

MB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_gaps_between_what_is_still_held_are_released() -> None:
    tensors = [torch.ones(64, 256) for _ in range(3200)]  # 64 KiB each, from the heap, not pages of their own
    kept = tensors[::32]
    release_freed()
    full = resident()
    del tensors
    release_freed()
    assert resident() < full - 150 * MB  # of 200
    assert all(bool((tensor == 1).all()) for tensor in kept)
