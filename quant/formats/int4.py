"""INT4 weights in groups of columns, symmetric or asymmetric, 16-bit inputs (W4A16).

Symmetric:   W~ = scale * q,         scale = absmax / 7.5, q in [-8, 7]
Asymmetric:  W~ = scale * (q - zp),  scale = (max - min) / 15, zp = round(-8 - min / scale), min <= 0 <= max

Stored as compressed-tensors' `pack-quantized`: `weight_packed` int32 (O, I/8), the lowest bits first, each code plus 8;
`weight_scale` (O, I/g) in the source's dtype; `weight_shape` int64 (2,); asymmetric also `weight_zero_point` int32
(ceil(O/8), I/g), packed down the rows. Each step of the scale's arithmetic is rounded to the source's dtype, as
compressed-tensors' `calculate_qparams` does on weights of that dtype; codes are computed in float32.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import absmax_scale, block_absmax, grouped, integers, integers_nearest, round_to
from quant.format import Format, Scales, column_problem
from quant.packing import pack_int4, unpack_int4

__all__ = ["int4"]


def int4(*, group_size: int, symmetric: bool) -> Format:
    """INT4 with one scale per `group_size` columns."""
    return Format(
        name="int4",
        options={"group_size": group_size, "symmetric": symmetric},
        layout_name="pack-quantized",
        weights={
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": group_size,
            "symmetric": symmetric,
            "dynamic": False,
        },
        block=(1, group_size),
        choose=partial(_choose_symmetric if symmetric else _choose_asymmetric, group_size),
        encode=_encode,
        decode=_decode,
        multiplier=lambda scales: scales.scale.float(),
        nearest=partial(integers_nearest, bits=4),
        pack=_pack,
        constants=_constants,
        unpack=_unpack,
        layout=partial(_layout, group_size, symmetric),
        once=("weight_shape",),
        problem=partial(column_problem, group_size),
    )


def _choose_symmetric(group_size: int, weight: Tensor, absmax: Tensor | None) -> Scales:
    return Scales(absmax_scale(block_absmax(grouped(weight, group_size), dim=2), 7.5, weight.dtype))


def _choose_asymmetric(group_size: int, weight: Tensor, absmax: Tensor | None) -> Scales:
    dtype = weight.dtype
    groups = grouped(weight.float(), group_size)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scale = absmax_scale(round_to(high - low, dtype), 15, dtype)
    zero = round_to(-8 - round_to(low / scale.float(), dtype), dtype)
    return Scales(scale, integers(zero, 4))


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    groups = _groups(weight.float(), scales) / scales.scale.float().unsqueeze(2)
    if scales.zero_point is not None:
        groups = groups + scales.zero_point.unsqueeze(2)
    return integers(groups, 4).flatten(1)


def _decode(codes: Tensor, scales: Scales) -> Tensor:
    groups = _groups(codes.float(), scales)
    if scales.zero_point is not None:
        groups = groups - scales.zero_point.unsqueeze(2)
    return (groups * scales.scale.float().unsqueeze(2)).flatten(1)


def _groups(x: Tensor, scales: Scales) -> Tensor:
    return grouped(x, x.shape[1] // scales.scale.shape[1])


def _pack(codes: Tensor, scales: Scales) -> dict[str, Tensor]:
    tensors = {"weight_packed": pack_int4(codes), "weight_scale": scales.scale}
    if scales.zero_point is not None:
        tensors["weight_zero_point"] = pack_int4(scales.zero_point.T).T.contiguous()
    return tensors


def _constants(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    return {"weight_shape": torch.tensor(shape)}


def _unpack(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    packed_zero = tensors.get("weight_zero_point")
    zero = None if packed_zero is None else unpack_int4(packed_zero.T.contiguous(), shape[0]).T.contiguous()
    return unpack_int4(tensors["weight_packed"], shape[1]), Scales(tensors["weight_scale"], zero)


def _layout(group_size: int, symmetric: bool, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    rows, columns = shape
    groups = columns // group_size
    specs = {
        "weight_packed": Spec(torch.int32, (rows, -(-columns // 8))),
        "weight_scale": Spec(dtype, (rows, groups)),
        "weight_shape": Spec(torch.int64, (2,)),
    }
    if not symmetric:
        specs["weight_zero_point"] = Spec(torch.int32, (-(-rows // 8), groups))
    return specs
