"""FP8 E4M3 weights with one scale per output channel or per tensor; inputs scaled per token at run time, or statically.

W~ = scale * code with scale = absmax / 448. Stored as compressed-tensors' `float-quantized`: `weight` float8_e4m3fn
(O, I) and `weight_scale` in the source's dtype, (O, 1) or (1,). The scale is rounded to that dtype before the codes
are computed, so that the codes fit the scale an engine reads. A scale per tensor spans all layers that an engine fuses
into one matrix, because vLLM rounds them anew to the largest of their scales. Static inputs have one calibrated scale
per tensor, stored as `input_scale` in the source's dtype, (1,); for experts, vLLM wants weights per tensor with them.
"""

from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import E4M3_MAX, absmax_scale, block_absmax, e4m3, e4m3_nearest, e4m3_values
from quant.format import Format, Scales
from quant.packing import pack_float8, unpack_bytes

__all__ = ["fp8"]


def fp8(*, strategy: str, inputs: str) -> Format:
    """FP8 with weights by `strategy` "channel" or "tensor", and `inputs` "dynamic" per token or "static" per tensor."""
    static = inputs == "static"
    per_tensor = strategy == "tensor"
    return Format(
        name="fp8",
        options={"strategy": strategy, "inputs": inputs},
        layout_name="float-quantized",
        weights={"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False},
        activations={
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor" if static else "token",
            "symmetric": True,
            "dynamic": not static,
        },
        block=(None, None) if per_tensor else (1, None),
        absmax_scope="fused" if per_tensor else None,
        choose=_choose_tensor if per_tensor else _choose_channel,
        encode=_encode,
        decode=_decode,
        multiplier=lambda scales: scales.scale.float().reshape(-1, 1),
        nearest=e4m3_nearest,
        pack=pack_float8,
        unpack=unpack_bytes,
        layout=partial(_layout, per_tensor),
        once=("weight_scale",) if per_tensor else (),
    )


def _choose_channel(weight: Tensor, absmax: Tensor | None) -> Scales:
    return Scales(absmax_scale(block_absmax(weight, dim=1, keepdim=True), E4M3_MAX, weight.dtype))


def _choose_tensor(weight: Tensor, absmax: Tensor | None) -> Scales:
    if absmax is None:
        raise ValueError("fp8 with strategy=tensor needs absmax, the largest magnitude of the weights that are fused")
    return Scales(absmax_scale(absmax.float().reshape(1), E4M3_MAX, weight.dtype))


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    return e4m3(weight.float() / scales.scale.float())


def _decode(codes: Tensor, scales: Scales) -> Tensor:
    return e4m3_values(codes) * scales.scale.float()


def _layout(per_tensor: bool, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    scale = (1,) if per_tensor else (shape[0], 1)
    return {"weight": Spec(torch.float8_e4m3fn, shape), "weight_scale": Spec(dtype, scale)}
