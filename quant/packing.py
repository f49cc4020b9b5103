"""Codes as stored tensors: a byte each, or four bits each, the first one in the lowest bits.

Of four bits the layouts of `pack-quantized` (eight codes per int32) and of the FP4 formats (two per uint8) are the
same bytes on a little-endian machine.
"""

import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from quant.format import Scales

__all__ = ["pack_float8", "pack_int4", "pack_int8", "pack_nibbles", "unpack_bytes", "unpack_int4", "unpack_nibbles"]

if sys.byteorder != "little":
    raise ImportError("packed checkpoints are written on little-endian machines only")


def pack_int8(codes: Tensor, scales: Scales) -> dict[str, Tensor]:
    """`Format.pack` of int8 codes beside one tensor of scales."""
    return {"weight": codes, "weight_scale": scales.scale}


def pack_float8(codes: Tensor, scales: Scales) -> dict[str, Tensor]:
    """`Format.pack` of E4M3 bits beside one tensor of scales."""
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scales.scale}


def unpack_bytes(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    """The inverse of `pack_int8` and `pack_float8`."""
    weight = tensors["weight"]
    return weight if weight.dtype is torch.int8 else weight.view(torch.uint8), Scales(tensors["weight_scale"])


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 (O, I/2) from uint8 codes 0..15 (O, I): the even column in the low half. I % 2 == 0."""
    pairs = codes.contiguous().view(torch.int16)  # one code per byte; no strided reads
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 codes 0..15 (O, I) from uint8 (O, I/2)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def pack_int4(codes: Tensor) -> Tensor:
    """int32 (O, ceil(I/8)) from int8 codes -8..7 (O, I), stored plus 8; a last partial word ends in zero bits."""
    biased = (codes + 8).view(torch.uint8)
    missing = -codes.shape[1] % 8
    return pack_nibbles(torch.nn.functional.pad(biased, (0, missing)) if missing else biased).view(torch.int32)


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """int8 codes -8..7 (O, columns) from int32 (O, ceil(columns/8))."""
    return unpack_nibbles(packed.view(torch.uint8))[:, :columns].view(torch.int8) - 8
