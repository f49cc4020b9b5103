"""Data-free quantization: read a run of rows, round it, write it at its place.

Memory holds one run of the source and its codes, whatever the model's size. Formats whose scale needs the largest
magnitude over layers that engines fuse read those weights once more beforehand. How far rounding moved each layer's
weights is told from a sample on the way.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from compress.architectures import fused_groups
from compress.errors import Refused
from compress.modules import Module
from compress.progress import Advance
from compress.tensor_file import TensorInfo, read_tensor
from compress.writer import ShardWriter
from quant.compiled import Kernel, compiled, eager, worth_compiling
from quant.elements import largest_magnitude
from quant.format import ROWS
from quant.plan import Assignment, QuantizePlan
from quant.weight_error import energies, relative_error

__all__ = ["copy_tensor", "run_streaming"]

RUN_BYTES = 4 << 20  # of tensors carried over, held at a time


def run_streaming(
    plan: QuantizePlan, directory: Path, device: torch.device, advance: Advance, *, compile_: bool | None = None
) -> dict[str, float]:
    """Write the planned shards into `directory`, rounding to nearest; the relative error of each layer's weights.

    Args:
        advance: called with source bytes as they are done.
        compile_: whether kernels are compiled; None: where the model is large enough to repay it.

    Raises:
        Refused: a weight is NaN or infinite.
    """
    by_name = {assignment.module.name: assignment for assignment in plan.quantized}
    total = sum(assignment.module.weight.nbytes for assignment in plan.quantized)
    make = compiled if (worth_compiling(total) if compile_ is None else compile_) else eager
    kernels: dict[int, Kernel] = {}
    errors: dict[str, float] = {}
    with ShardWriter(directory, plan.shards) as writer:
        for name, info in plan.copies.items():
            copy_tensor(name, info, plan.outputs[name].dtype, writer, advance)
        for group in fused_groups([*by_name]):
            members = [by_name[name] for name in group]
            if (fmt := members[0].fmt) is not None:
                kernel = kernels.setdefault(id(fmt), make(fmt))
                errors |= _quantize_group(members, kernel, device, writer, advance)
    return {name: errors[name] for name in by_name if name in errors}


def copy_tensor(name: str, info: TensorInfo, dtype: torch.dtype, writer: ShardWriter, advance: Advance) -> None:
    """Carry one tensor over, cast to `dtype`, a run of rows at a time.

    Raises:
        Refused: it is NaN or infinite.
    """
    for part in _runs(info):
        tensor = read_tensor(part)
        if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(tensor.isfinite().all()):
            raise Refused(f"tensor {name!r} holds NaN or infinite values: the source checkpoint is damaged")
        writer.append(name, tensor.to(dtype))
        advance(part.nbytes)


def _runs(info: TensorInfo, size: int = RUN_BYTES) -> Iterator[TensorInfo]:
    """The tensor in runs of rows of about `size` bytes, each a multiple of ROWS."""
    if info.nbytes <= size or not info.shape:
        yield info
        return
    rows = info.shape[0]
    step = max(1, size * rows // info.nbytes // ROWS) * ROWS
    for start in range(0, rows, step):
        yield info.rows(start, min(start + step, rows))


def _quantize_group(
    group: list[Assignment], kernel: Kernel, device: torch.device, writer: ShardWriter, advance: Advance
) -> dict[str, float]:
    """Modules that share one format, and where the format has one, its scale over all of them."""
    absmax = _absmax(group, device) if kernel.fmt.absmax_scope else None
    errors: dict[str, float] = {}
    for assignment in group:
        name = assignment.module.name
        try:
            error = _quantize(assignment.module, kernel, absmax, device, writer, advance)
        except ValueError as problem:
            raise Refused(f"{name} cannot be quantized: {problem}") from problem
        errors |= {} if error is None else {name: error}
    return errors


def _absmax(group: list[Assignment], device: torch.device) -> Tensor:
    runs = [largest_magnitude(read_tensor(run).to(device)) for member in group for run in _runs(member.module.weight)]
    return torch.stack(runs).amax()


def _quantize(
    module: Module, kernel: Kernel, absmax: Tensor | None, device: torch.device, writer: ShardWriter, advance: Advance
) -> float | None:
    """Write one module, run by run: what is the same for every run comes once. The error of its weights."""
    start, moved = 0, []
    for run in _runs(module.weight, kernel.run_bytes):
        weight = read_tensor(run).to(device)
        codes, scales = kernel.rounded(weight, absmax)
        for suffix, tensor in kernel.fmt.pack(codes, scales).items():
            if start == 0 or suffix not in kernel.fmt.once:
                writer.append(f"{module.name}.{suffix}", tensor)
        moved.append(energies(weight, codes, scales, kernel.fmt, start=start))
        start += run.shape[0]
        advance(run.nbytes)
    for suffix, tensor in kernel.fmt.constants(module.shape, module.weight.dtype).items():
        writer.append(f"{module.name}.{suffix}", tensor)
    return relative_error(moved)
