"""Writing a checkpoint whose bytes are planned before they exist.

The plan fixes every shard, header and offset from dtypes and shapes alone: the dry run prints it, the disk space is
reserved from it, and tensors are written at their place in any order, in runs of rows, so that memory holds one run at
a time. Directories are built under a staging name and renamed into place by `compress.replace`.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from compress.checkpoint import INDEX
from compress.tensor_file import Spec, encode_header

__all__ = ["ShardPlan", "ShardWriter", "copy_side_file", "free_bytes", "plan_shards", "write_json"]


@dataclass(frozen=True)
class ShardPlan:
    """Which tensor goes into which file, in file order."""

    files: dict[str, dict[str, Spec]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(spec.nbytes for specs in self.files.values() for spec in specs.values())


def plan_shards(specs: Mapping[str, Spec], max_shard_size: int) -> ShardPlan:
    """Fill shards in the given order up to `max_shard_size` bytes; a larger tensor gets a shard of its own.

    Inside a shard wider dtypes come first, so that every tensor is aligned.
    """
    shards: list[dict[str, Spec]] = [{}]
    room = max_shard_size
    for name, spec in specs.items():
        if spec.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_size
        shards[-1][name] = spec
        room -= spec.nbytes
    aligned = [dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize)) for shard in shards]
    if len(aligned) == 1:
        return ShardPlan({"model.safetensors": aligned[0]})
    return ShardPlan({f"model-{i:05}-of-{len(aligned):05}.safetensors": shard for i, shard in enumerate(aligned, 1)})


class ShardWriter:
    """Context manager: reserves the planned files in `directory` and fills them.

    Leaving it without an error checks that every planned byte was written, makes the files durable and adds the index.
    """

    def __init__(self, directory: Path, plan: ShardPlan) -> None:
        self.directory = directory
        self.plan = plan
        self._files: dict[str, BinaryIO] = {}
        self._at: dict[str, tuple[BinaryIO, int, int, Spec]] = {}  # name -> file, next byte, end, spec

    def __enter__(self) -> "ShardWriter":
        try:
            for filename, specs in self.plan.files.items():
                self._reserve(filename, specs)
        except BaseException:
            self._close()
            raise
        return self

    def _reserve(self, filename: str, specs: dict[str, Spec]) -> None:
        header = encode_header(specs)
        file = self._files[filename] = (self.directory / filename).open("xb", buffering=0)
        size = len(header) + sum(spec.nbytes for spec in specs.values())
        _allocate(file, size)
        file.write(header)
        at = len(header)
        for name, spec in specs.items():
            self._at[name] = (file, at, at + spec.nbytes, spec)
            at += spec.nbytes

    def append(self, name: str, rows: Tensor) -> None:
        """Write the next run of rows (or the whole) of a planned tensor.

        Raises:
            ValueError: a name, dtype or number of bytes that was not planned.
        """
        file, at, end, spec = self._at[name]
        data = rows.detach().to("cpu").contiguous()
        if data.dtype != spec.dtype or at + data.nbytes > end:
            raise ValueError(f"{name}: {data.dtype} {tuple(data.shape)} does not fit the planned {spec}")
        if data.nbytes:
            _write_at(file, data, at)
        self._at[name] = (file, at + data.nbytes, end, spec)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._close()

    def _finish(self) -> None:
        short = [name for name, (_, at, end, _) in self._at.items() if at != end]
        if short:
            raise ValueError(f"{len(short)} planned tensors were not written whole, first {short[0]!r}")
        for file in self._files.values():
            os.fsync(file.fileno())
        if len(self.plan.files) > 1:
            weight_map = {name: filename for filename, specs in self.plan.files.items() for name in specs}
            index = {
                "metadata": {"total_size": self.plan.nbytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_json(self.directory / INDEX, index)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()


def _write_at(file: BinaryIO, data: Tensor, at: int) -> None:
    view = data.view(-1).view(torch.uint8).numpy().data
    while len(view):
        count = os.pwrite(file.fileno(), view, at)
        view, at = view[count:], at + count


def _allocate(file: BinaryIO, size: int) -> None:
    """Reserve the bytes, so that a full disk shows now and not after hours."""
    if not hasattr(os, "posix_fallocate"):
        file.truncate(size)
        return
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        file.truncate(size)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file durably."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def copy_side_file(source: Path, target: Path) -> None:
    """Copy one side file (following links: hub caches are made of them) durably."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that will hold `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
