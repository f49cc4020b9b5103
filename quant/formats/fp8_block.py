"""FP8 E4M3 weights with one scale per 128x128 block, and inputs scaled per token and group of 128 at run time.

W~ = scale * code with scale = absmax / 448 (the recipe of DeepSeek-V3, arXiv 2412.19437 section 3.3). Stored as
compressed-tensors' `float-quantized`: `weight` float8_e4m3fn (O, I), `weight_scale` (ceil(O/128), I/128) in the
source's dtype. A last block may have fewer rows; columns must divide, because the inputs' groups of 128 do.
"""

from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import E4M3_MAX, absmax_scale, block_absmax, e4m3, e4m3_nearest, e4m3_values, grouped
from quant.format import Format, Scales, column_problem
from quant.packing import pack_float8, unpack_bytes

__all__ = ["fp8_block"]

SIDE = 128


def fp8_block() -> Format:
    """FP8 in 128x128 blocks."""
    shared = {"num_bits": 8, "type": "float", "symmetric": True}
    return Format(
        name="fp8-block",
        options={},
        layout_name="float-quantized",
        weights={**shared, "strategy": "block", "block_structure": [SIDE, SIDE], "dynamic": False},
        activations={**shared, "strategy": "group", "group_size": SIDE, "dynamic": True},
        block=(SIDE, SIDE),
        choose=_choose,
        encode=_encode,
        decode=_decode,
        multiplier=lambda scales: scales.scale.float(),
        nearest=e4m3_nearest,
        pack=pack_float8,
        unpack=unpack_bytes,
        layout=_layout,
        problem=partial(column_problem, SIDE),
    )


def _choose(weight: Tensor, absmax: Tensor | None) -> Scales:
    by_row = block_absmax(grouped(weight, SIDE), dim=2)  # (O, I/128)
    padded = torch.nn.functional.pad(by_row, (0, 0, 0, -by_row.shape[0] % SIDE))
    return Scales(absmax_scale(padded.reshape(-1, SIDE, by_row.shape[1]).amax(dim=1), E4M3_MAX, weight.dtype))


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    return e4m3(grouped(weight.float(), SIDE) / _by_row(scales, weight.shape[0])).flatten(1)


def _decode(codes: Tensor, scales: Scales) -> Tensor:
    return (grouped(e4m3_values(codes), SIDE) * _by_row(scales, codes.shape[0])).flatten(1)


def _by_row(scales: Scales, rows: int) -> Tensor:
    """(O, I/128, 1): each row's scales, float32."""
    return scales.scale.float().repeat_interleave(SIDE, dim=0)[:rows].unsqueeze(2)


def _layout(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    blocks = (-(-shape[0] // SIDE), shape[1] // SIDE)
    return {"weight": Spec(torch.float8_e4m3fn, shape), "weight_scale": Spec(dtype, blocks)}
