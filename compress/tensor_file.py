"""The safetensors file: its header read and checked, its tensors read by offset, its bytes planned before they exist.

We read the header ourselves because two things need the offsets: reading a run of rows without mapping the file (mapped
pages count as resident memory), and writing tensors at their place while they are made, so that no shard is ever held
in memory. Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of
JSON, then the data, without holes.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index  # an integer as it is, never one made of text or a fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.inputs import parse_json

__all__ = ["DTYPES", "Spec", "TensorInfo", "encode_header", "read_header", "read_tensor", "tensor_info"]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of one stored tensor, known before its values are."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: a contiguous run of bytes of one file."""

    spec: Spec
    path: Path
    offset: int  # bytes from the start of the file

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def rows(self, start: int, stop: int) -> "TensorInfo":
        """The run of rows [start, stop) along dim 0, itself contiguous."""
        row = self.nbytes // self.shape[0]
        return TensorInfo(Spec(self.dtype, (stop - start, *self.shape[1:])), self.path, self.offset + start * row)

    def item(self, index: int) -> "TensorInfo":
        """Entry `index` along dim 0, without that dim: one expert of a fused (E, O, I) tensor."""
        entry = self.rows(index, index + 1)
        return TensorInfo(Spec(self.dtype, self.shape[1:]), self.path, entry.offset)


def read_tensor(info: TensorInfo) -> Tensor:
    """Read one tensor into memory of its own; nothing is mapped.

    Raises:
        CheckpointError: the file ends before the tensor does.
    """
    buffer = torch.empty(info.nbytes, dtype=torch.uint8)
    with open(info.path, "rb", buffering=0) as file:
        file.seek(info.offset)
        view = memoryview(buffer.numpy().data)
        while len(view):
            count = file.readinto(view)
            if not count:
                raise CheckpointError(
                    f"{info.path} ends early, at a tensor of {info.nbytes} bytes: fetch the file again"
                )
            view = view[count:]
    return buffer.view(info.dtype).reshape(info.shape) if info.nbytes else torch.empty(info.shape, dtype=info.dtype)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in file order, each checked against the file's size.

    Raises:
        CheckpointError: no safetensors file, truncated, corrupt, a name twice, or a dtype we do not read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or no file: fetch the checkpoint again")
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
            raise CheckpointError(f"{path} is not a whole safetensors file ({size} bytes): fetch it again")
        raw = file.read(length)
    entries = _parse(raw, path)
    entries.pop("__metadata__", None)
    start = 8 + length
    infos = {name: tensor_info(path, start, name, entry) for name, entry in entries.items()}
    _check_cover(path, start, size, infos.values())
    return infos


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path} holds the tensor {twice!r} twice: write the file again")
        return out

    try:
        entries = parse_json(raw, unique)
    except ValueError as error:
        raise CheckpointError(f"{path} has a corrupt safetensors header ({error}): fetch the file again") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} has a corrupt safetensors header (no object): fetch the file again")
    return entries


def tensor_info(path: Path, start: int, name: str, entry: Any) -> TensorInfo:
    """One entry of a header whose data begins at byte `start`.

    Raises:
        CheckpointError: fields missing, a dtype that is not read, or sizes that disagree.
    """
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(map(index, entry["shape"])), entry["data_offsets"]
        begin, end = index(begin), index(end)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a corrupt entry for tensor {name!r}: fetch the file again") from error
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}, which is not one of {', '.join(DTYPES)}")
    spec = Spec(DTYPES[dtype], shape)
    if end - begin != spec.nbytes or min(shape, default=0) < 0 or begin < 0:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {list(shape)} has {end - begin} bytes: the header is corrupt"
        )
    return TensorInfo(spec, path, start + begin)


def _check_cover(path: Path, start: int, size: int, infos: Iterable[TensorInfo]) -> None:
    at = start
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            raise CheckpointError(f"{path} has overlapping tensors or holes at byte {at}: the header is corrupt")
        at += info.nbytes
    if at != size:
        raise CheckpointError(
            f"{path} has {size} bytes, its header says {at}: the file is truncated or corrupt, fetch it again"
        )


def encode_header(specs: Mapping[str, Spec]) -> bytes:
    """Length and JSON of a file that holds `specs` in this order, padded to 8 bytes as the library does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, spec in specs.items():
        header[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
