"""What a number format is: a grid of values, the block of weights that shares one scale, and its bytes.

A format defines the grid; a method chooses codes and scales. Every method works on the three verbs `choose`, `encode`
and `decode` alone, so that every method works with every format; `pack` and `unpack` know the bytes on disk.

    choose(W)              -> Scales      round-to-nearest scales, in the dtype they are stored in
    encode(W, scales)      -> codes       nearest code of every weight
    decode(codes, scales)  -> W~          the weight an engine computes with, float32
    pack(codes, scales)    -> tensors     exactly the bytes of the checkpoint, by tensor suffix
    unpack(tensors, shape) -> codes, scales

O = out_features (rows), I = in_features (columns); weights are (O, I).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.tensor_file import Spec

__all__ = ["Format", "Scales", "Spec", "dequantize", "quantize"]


@dataclass(frozen=True)
class Scales:
    """The numbers that turn codes into weights, in the dtypes that are stored.

    scale        one per block of `Format.block`: (O / rows, I / columns), rounded up where rows are ragged
    zero_point   same shape, int8, for asymmetric integers
    global_scale float32 (1,), NVFP4's divisor, shared by layers an engine fuses
    """

    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """One number format with its options bound; every field a pure function or plain data."""

    name: str
    summary: str  # one line for `compress list formats`
    layout_name: str  # compressed-tensors' name of the layout, e.g. "pack-quantized"
    weights: Mapping[str, Any]  # minimal QuantizationArgs of the weights
    activations: Mapping[str, Any] | None  # minimal QuantizationArgs of the inputs, None = 16-bit activations
    block: tuple[int | None, int | None]  # rows x columns that share one scale; None = all of them
    absmax_scope: (
        str | None
    )  # "tensor": choose() needs the whole tensor's absmax; "fused": of the fused group
    choose: Callable[[Tensor, Tensor | None], Scales]  # (W rows, absmax scalar or None)
    encode: Callable[[Tensor, Scales], Tensor]
    decode: Callable[[Tensor, Scales], Tensor]
    pack: Callable[[Tensor, Scales], dict[str, Tensor]]
    unpack: Callable[[Mapping[str, Tensor], tuple[int, int]], tuple[Tensor, Scales]]
    layout: Callable[[tuple[int, int], torch.dtype], dict[str, Spec]]
    problem: Callable[[tuple[int, int]], str | None]  # why a weight of this shape cannot take the format


def quantize(weight: Tensor, fmt: Format, absmax: Tensor | None = None) -> dict[str, Tensor]:
    """Round-to-nearest: the tensors to store for `weight` (O, I), by suffix ("weight", "weight_scale", ...).

    Args:
        weight: (O, I) or a run of its rows, any float dtype, finite.
        fmt: the format.
        absmax: float32 scalar, largest magnitude over `fmt.absmax_scope`; None where the format needs none.
    """
    scales = fmt.choose(weight, absmax)
    return fmt.pack(fmt.encode(weight, scales), scales)


def dequantize(tensors: Mapping[str, Tensor], fmt: Format, shape: tuple[int, int]) -> Tensor:
    """The float32 weight (O, I) that an engine computes with, from the stored tensors."""
    return fmt.decode(*fmt.unpack(tensors, shape))
