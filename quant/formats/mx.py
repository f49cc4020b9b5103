"""MXFP4 and MXFP8: weights in groups of 32 with a power-of-two scale; 16-bit inputs, or inputs in the same format.

W~ = 2^(byte - 127) * code (OCP Microscaling formats 1.0), code an E2M1 or E4M3 value. Stored as compressed-tensors'
`mxfp4-pack-quantized`, `weight_packed` uint8 (O, I/2) with the even column in the low half, and `mxfp8-quantized`,
`weight` float8_e4m3fn (O, I); both with `weight_scale` uint8 (O, I/32), E8M0. Inputs are scaled at run time.

The rule that chooses the exponent is MXFP4's largest lever: "ceil", the default, clips nothing and recovers most of
what the standard's "floor" loses on mathematics; "even" is compressed-tensors' and equal to it in every byte. Any
decoder reads all three. In MXFP8 "even" and "ceil" differ only for a largest magnitude of 1.75 times a power of two.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import (
    E2M1_MAX,
    E4M3_MAX,
    block_absmax,
    e2m1,
    e2m1_nearest,
    e2m1_values,
    e4m3,
    e4m3_nearest,
    e4m3_values,
    e8m0_values,
    grouped,
    mx_exponent,
)
from quant.format import Format, Scales, column_problem
from quant.packing import pack_float8, pack_nibbles, unpack_bytes, unpack_nibbles

__all__ = ["mxfp4", "mxfp8"]

GROUP = 32

Rounding = Callable[[Tensor], Tensor]  # onto the codes of a grid, or back to its values


def mxfp4(*, activations: bool, exponent: str) -> Format:
    """MXFP4, with the inputs in MXFP4 as well if `activations`; `exponent` as in `mx_exponent`."""
    return Format(
        name="mxfp4",
        options={"activations": activations, "exponent": exponent},
        layout_name="mxfp4-pack-quantized",
        weights=_arguments(4, dynamic=False),
        activations=_arguments(4, dynamic=True) if activations else None,
        block=(1, GROUP),
        choose=partial(_choose, E2M1_MAX, exponent),
        encode=partial(_encode, e2m1),
        decode=partial(_decode, e2m1_values),
        multiplier=lambda scales: e8m0_values(scales.scale),
        nearest=e2m1_nearest,
        pack=lambda codes, scales: {"weight_packed": pack_nibbles(codes), "weight_scale": scales.scale},
        unpack=_unpack_nibbles,
        layout=lambda shape, dtype: {"weight_packed": Spec(torch.uint8, (shape[0], shape[1] // 2)), **_scale(shape)},
        problem=partial(column_problem, GROUP),
    )


def mxfp8(*, activations: bool, exponent: str) -> Format:
    """MXFP8, with the inputs in MXFP8 as well if `activations`; `exponent` as in `mx_exponent`."""
    return Format(
        name="mxfp8",
        options={"activations": activations, "exponent": exponent},
        layout_name="mxfp8-quantized",
        weights=_arguments(8, dynamic=False),
        activations=_arguments(8, dynamic=True) if activations else None,
        block=(1, GROUP),
        choose=partial(_choose, E4M3_MAX, exponent),
        encode=partial(_encode, e4m3),
        decode=partial(_decode, e4m3_values),
        multiplier=lambda scales: e8m0_values(scales.scale),
        nearest=e4m3_nearest,
        pack=pack_float8,
        unpack=unpack_bytes,
        layout=lambda shape, dtype: {"weight": Spec(torch.float8_e4m3fn, shape), **_scale(shape)},
        problem=partial(column_problem, GROUP),
    )


def _arguments(bits: int, *, dynamic: bool) -> dict[str, object]:
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.uint8",
    }


def _choose(largest: float, exponent: str, weight: Tensor, absmax: Tensor | None) -> Scales:
    return Scales(mx_exponent(block_absmax(grouped(weight, GROUP), dim=2), largest, exponent))


def _encode(rounded: Rounding, weight: Tensor, scales: Scales) -> Tensor:
    return rounded(grouped(weight.float(), GROUP) / e8m0_values(scales.scale).unsqueeze(2)).flatten(1)


def _decode(values: Rounding, codes: Tensor, scales: Scales) -> Tensor:
    return (grouped(values(codes), GROUP) * e8m0_values(scales.scale).unsqueeze(2)).flatten(1)


def _unpack_nibbles(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    return unpack_nibbles(tensors["weight_packed"]), Scales(tensors["weight_scale"])


def _scale(shape: tuple[int, int]) -> dict[str, Spec]:
    return {"weight_scale": Spec(torch.uint8, (shape[0], shape[1] // GROUP))}
