"""MXFP4: E2M1 weights in groups of 32 with a power-of-two scale; 16-bit inputs, or inputs in MXFP4 at run time.

W~ = 2^(byte - 127) * code (OCP Microscaling formats 1.0). Stored as compressed-tensors' `mxfp4-pack-quantized`:
`weight_packed` uint8 (O, I/2), the even column in the low half; `weight_scale` uint8 (O, I/32), E8M0.

The rule that chooses the exponent is the format's largest lever: "ceil", the default, clips nothing and recovers most
of what the standard's "floor" loses on mathematics; "even" is compressed-tensors' and equal to it in every byte. Any
decoder reads all three.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import E2M1_MAX, block_absmax, e2m1, e2m1_values, e8m0_values, grouped, mx_exponent
from quant.format import Format, Scales, column_problem
from quant.packing import pack_nibbles, unpack_nibbles

__all__ = ["mxfp4"]

GROUP = 32


def mxfp4(*, activations: bool, exponent: str) -> Format:
    """MXFP4, with the inputs in MXFP4 as well if `activations`; `exponent` as in `mx_exponent`."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    return Format(
        name="mxfp4",
        options={"activations": activations, "exponent": exponent},
        layout_name="mxfp4-pack-quantized",
        weights=weights,
        activations={**weights, "dynamic": True} if activations else None,
        block=(1, GROUP),
        choose=partial(_choose, exponent),
        encode=_encode,
        decode=_decode,
        pack=lambda codes, scales: {"weight_packed": pack_nibbles(codes), "weight_scale": scales.scale},
        unpack=_unpack,
        layout=_layout,
        problem=partial(column_problem, GROUP),
    )


def _choose(exponent: str, weight: Tensor, absmax: Tensor | None) -> Scales:
    return Scales(mx_exponent(block_absmax(grouped(weight, GROUP), dim=2), E2M1_MAX, exponent))


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    return e2m1(grouped(weight.float(), GROUP) / e8m0_values(scales.scale).unsqueeze(2)).flatten(1)


def _decode(codes: Tensor, scales: Scales) -> Tensor:
    return (grouped(e2m1_values(codes), GROUP) * e8m0_values(scales.scale).unsqueeze(2)).flatten(1)


def _unpack(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    return unpack_nibbles(tensors["weight_packed"]), Scales(tensors["weight_scale"])


def _layout(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    rows, columns = shape
    return {
        "weight_packed": Spec(torch.uint8, (rows, columns // 2)),
        "weight_scale": Spec(torch.uint8, (rows, columns // GROUP)),
    }
