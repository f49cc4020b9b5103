"""NVFP4: E2M1 weights in groups of 16, an E4M3 scale per group and one float32 divisor; 16-bit or NVFP4 inputs.

W~ = code * (scale / gs) with gs = 448 * 6 / absmax and scale = e4m3(absmax16 / 6 * gs). `absmax` is that of all layers
an engine fuses into one matrix (q, k, v; gate, up), because it keeps a single divisor for them. Stored as
compressed-tensors' `nvfp4-pack-quantized`: `weight_packed` uint8 (O, I/2), the even column in the low half;
`weight_scale` float8_e4m3fn (O, I/16); `weight_global_scale` float32 (1,). absmax16 / 6 is rounded to the source's
dtype, as `calculate_qparams` does. NVFP4 inputs are scaled per group at run time under a calibrated divisor of their
own, `input_global_scale` float32 (1,).
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import E2M1_MAX, E4M3_MAX, block_absmax, e2m1, e2m1_nearest, e2m1_values, e4m3, grouped, round_to
from quant.format import Format, Scales, column_problem
from quant.packing import pack_nibbles, unpack_nibbles

__all__ = ["nvfp4"]

GROUP = 16
SCALE_OF_ZERO = 0.125  # stored where a group's scale rounds to zero, as in compressed-tensors
OVERFLOW = 464.0  # E4M3 rounds to 448 up to here


def nvfp4(*, activations: bool) -> Format:
    """NVFP4 weights, with the inputs in NVFP4 as well if `activations`."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": GROUP,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    return Format(
        name="nvfp4",
        options={"activations": activations},
        layout_name="nvfp4-pack-quantized",
        weights=weights,
        activations={**weights, "dynamic": "local"} if activations else None,
        block=(1, GROUP),
        absmax_scope="fused",
        choose=_choose,
        encode=_encode,
        decode=_decode,
        multiplier=_multiplier,
        nearest=e2m1_nearest,
        pack=_pack,
        unpack=_unpack,
        layout=_layout,
        once=("weight_global_scale",),
        problem=partial(column_problem, GROUP),
    )


def _choose(weight: Tensor, absmax: Tensor | None) -> Scales:
    if absmax is None:
        raise ValueError("nvfp4 needs absmax, the largest magnitude of the weight and of all that is fused with it")
    global_scale = _global_scale(absmax.float().reshape(1))
    local = round_to(block_absmax(grouped(weight, GROUP), dim=2) / E2M1_MAX, weight.dtype) * global_scale
    local = torch.where(local <= 2.0**-10, SCALE_OF_ZERO, local)  # half of E4M3's smallest value rounds to zero
    local = torch.where(local > OVERFLOW, torch.nan, local)  # a group above `absmax`: refused as not finite
    return Scales(e4m3(local).view(torch.float8_e4m3fn), global_scale=global_scale)


def _global_scale(absmax: Tensor) -> Tensor:
    """NaN and inf give NaN; a weight so small that the divisor overflows, zero above all, gives 1."""
    scale = (E4M3_MAX * E2M1_MAX) / absmax.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(absmax.isfinite(), torch.where(scale.isinf(), 1, scale), torch.nan)


def _multiplier(scales: Scales) -> Tensor:
    """(O, I/16): what a code's value is multiplied with, float32."""
    if scales.global_scale is None:
        raise ValueError("nvfp4 scales have no global_scale")
    return scales.scale.float() / scales.global_scale


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    return e2m1(grouped(weight.float(), GROUP) / _multiplier(scales).unsqueeze(2)).flatten(1)


def _decode(codes: Tensor, scales: Scales) -> Tensor:
    return (grouped(e2m1_values(codes), GROUP) * _multiplier(scales).unsqueeze(2)).flatten(1)


def _pack(codes: Tensor, scales: Scales) -> dict[str, Tensor]:
    if scales.global_scale is None:
        raise ValueError("nvfp4 scales have no global_scale")
    return {
        "weight_packed": pack_nibbles(codes),
        "weight_scale": scales.scale,
        "weight_global_scale": scales.global_scale,
    }


def _unpack(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    scales = Scales(tensors["weight_scale"], global_scale=tensors["weight_global_scale"])
    return unpack_nibbles(tensors["weight_packed"]), scales


def _layout(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    rows, columns = shape
    return {
        "weight_packed": Spec(torch.uint8, (rows, columns // 2)),
        "weight_scale": Spec(torch.float8_e4m3fn, (rows, columns // GROUP)),
        "weight_global_scale": Spec(torch.float32, (1,)),
    }
