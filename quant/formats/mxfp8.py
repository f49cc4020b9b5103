"""MXFP8: E4M3 weights in groups of 32 with a power-of-two scale; inputs in MXFP8 at run time, or 16-bit.

W~ = 2^(byte - 127) * code (OCP Microscaling formats 1.0). Stored as compressed-tensors' `mxfp8-quantized`: `weight`
float8_e4m3fn (O, I), `weight_scale` uint8 (O, I/32), E8M0. The exponent rules are MXFP4's; here "even" and "ceil"
differ only for a largest magnitude of exactly 1.75 times a power of two.
"""

from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import E4M3_MAX, block_absmax, e4m3, e4m3_values, e8m0_values, grouped, mx_exponent
from quant.format import Format, Scales, column_problem
from quant.packing import pack_float8, unpack_bytes

__all__ = ["mxfp8"]

GROUP = 32


def mxfp8(*, activations: bool, exponent: str) -> Format:
    """MXFP8, with the inputs in MXFP8 as well if `activations`; `exponent` as in `mx_exponent`."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    return Format(
        name="mxfp8",
        options={"activations": activations, "exponent": exponent},
        layout_name="mxfp8-quantized",
        weights=weights,
        activations={**weights, "dynamic": True} if activations else None,
        block=(1, GROUP),
        choose=partial(_choose, exponent),
        encode=_encode,
        decode=_decode,
        pack=pack_float8,
        unpack=unpack_bytes,
        layout=_layout,
        problem=partial(column_problem, GROUP),
    )


def _choose(exponent: str, weight: Tensor, absmax: Tensor | None) -> Scales:
    return Scales(mx_exponent(block_absmax(grouped(weight, GROUP), dim=2), E4M3_MAX, exponent))


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    return e4m3(grouped(weight.float(), GROUP) / e8m0_values(scales.scale).unsqueeze(2)).flatten(1)


def _decode(codes: Tensor, scales: Scales) -> Tensor:
    return (grouped(e4m3_values(codes), GROUP) * e8m0_values(scales.scale).unsqueeze(2)).flatten(1)


def _layout(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    scale = Spec(torch.uint8, (shape[0], shape[1] // GROUP))
    return {"weight": Spec(torch.float8_e4m3fn, shape), "weight_scale": scale}
