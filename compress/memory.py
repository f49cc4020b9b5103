"""The most memory this process has held, and giving back what it no longer needs.

On Linux getrusage's figure is inherited from the process that started this one, so the kernel's own mark is read.
"""

import ctypes
import re
import resource
import sys
from pathlib import Path

__all__ = ["peak_resident_bytes", "release_freed"]

STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """Largest resident set so far, in bytes."""
    if STATUS.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text(encoding="ascii", errors="replace"))
        if found:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_freed() -> None:
    """Hand freed memory back to the system, where its allocator can (glibc).

    Tensors of many sizes that live for long, like those of paused passes, leave gaps behind that others do not fit in.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
