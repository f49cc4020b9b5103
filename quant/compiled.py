"""Round-to-nearest as one compiled pass: the same bytes as `quantize`, several times faster.

A `Kernel` turns a run of weight rows into the tensors to store, without `Format.constants`; `join` or a streaming
writer puts runs together. `eager` runs the format as it is written. `compiled` lets `torch.compile` fuse choosing
scales and encoding (inductor: C++ on CPUs, Triton on GPUs); packing stays outside, where changing a dtype is free.

One compilation serves every shape of weight: the number of rows is left open, and a format with one scale per group of
columns sees a matrix of groups, (O * I/g, g). It takes about 10 s on two cores and torch caches the result on disk, so
`worth_compiling` asks for a few GB of weights first.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quant.format import Format, Scales, require_finite

__all__ = ["Kernel", "compiled", "eager", "worth_compiling"]

Chosen = Callable[[Tensor, Tensor | None], tuple[Tensor, Scales]]


@dataclass(frozen=True)
class Kernel:
    """Called with (weight rows, absmax), as `quantize` is; returns tensors by suffix; raises as `quantize` does.

    run_bytes    of source weights at a time at which it is fastest: intermediates stay in cache
    why_eager    why it is not compiled; None when it is
    """

    fmt: Format
    choose_and_encode: Chosen
    run_bytes: int
    why_eager: str | None

    def __call__(self, weight: Tensor, absmax: Tensor | None = None) -> dict[str, Tensor]:
        """Tensors to store for a run of rows (R, I); R is a multiple of `ROWS` unless it is the last run."""
        return self.fmt.pack(*self.rounded(weight, absmax))

    def rounded(self, weight: Tensor, absmax: Tensor | None = None) -> tuple[Tensor, Scales]:
        """The codes and scales of the same, not packed yet."""
        codes, scales = self.choose_and_encode(weight, absmax)
        require_finite(scales)
        return codes, scales


def eager(fmt: Format, why: str = "not asked to compile") -> Kernel:
    """The format as it is written."""
    return Kernel(fmt, lambda weight, absmax: _choose_and_encode(fmt, weight, absmax), 1 << 20, why)


def compiled(fmt: Format) -> Kernel:
    """The format compiled, or eager with the reason in `why_eager`."""
    obstacle = _obstacle(fmt)
    if obstacle:
        return eager(fmt, obstacle)
    graph = torch.compile(lambda weight, absmax: _choose_and_encode(fmt, weight, absmax))
    rows, columns = fmt.block
    group = columns if rows == 1 else None

    def run(weight: Tensor, absmax: Tensor | None) -> tuple[Tensor, Scales]:
        if weight.dtype is torch.float16:  # inductor keeps float16 scales in float32, which changes their codes
            return _choose_and_encode(fmt, weight, absmax)
        matrix = weight if group is None else weight.reshape(-1, group)
        torch._dynamo.maybe_mark_dynamic(matrix, 0)
        (torch._dynamo.maybe_mark_dynamic if columns is None else torch._dynamo.mark_static)(matrix, 1)
        with torch.no_grad():
            codes, scales = graph(matrix, absmax)
        return codes.reshape(weight.shape), scales if group is None else _by_row(scales, weight.shape[0])

    return Kernel(fmt, run, 4 << 20, None)


def worth_compiling(total_bytes: int) -> bool:
    """Whether quantizing so many bytes of source weights repays a compilation that is not cached yet."""
    return total_bytes >= 4 << 30


def _choose_and_encode(fmt: Format, weight: Tensor, absmax: Tensor | None) -> tuple[Tensor, Scales]:
    scales = fmt.choose(weight, absmax)
    return fmt.encode(weight, scales), scales


def _by_row(scales: Scales, rows: int) -> Scales:
    zero = scales.zero_point
    return Scales(scales.scale.reshape(rows, -1), None if zero is None else zero.reshape(rows, -1), scales.global_scale)


def _obstacle(fmt: Format) -> str | None:
    """Why nothing can be gained or compiled here."""
    if fmt.name == "bf16":
        return "a cast is one pass already"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler!r} is not on PATH"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python.h is missing: install Python's development headers"
    return None
