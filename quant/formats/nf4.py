"""NF4: sixteen quantiles of a normal distribution, one absmax per 64 weights, 16-bit inputs; bitsandbytes' layout.

W~ = absmax * NF4[code] (QLoRA, arXiv 2305.14314 section 3). Stored as bitsandbytes' loader in transformers reads it:
`weight` uint8 (O*I/2, 1), the first of two codes in the HIGH half; `weight.absmax` float32 (O*I/64,);
`weight.quant_map` float32 (16,), the table; `weight.quant_state.bitsandbytes__nf4`, the bytes of a JSON object. The
arithmetic is ours and equal to bitsandbytes' in every byte, so that methods can choose codes and scales. Left out:
double quantization of absmax, and blocks that cross rows.
"""

import json
from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import block_absmax, grouped
from quant.format import Format, Scales, column_problem
from quant.packing import pack_nibbles, unpack_nibbles

__all__ = ["NF4", "nf4"]

BLOCK = 64
STATE = "weight.quant_state.bitsandbytes__nf4"
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
BOUNDS = (
    (torch.tensor(NF4)[:-1] + torch.tensor(NF4)[1:]) / 2
).tolist()  # float32 midpoints; the lower code takes a tie


def nf4() -> Format:
    """NF4 in blocks of 64 without double quantization."""
    return Format(
        name="nf4",
        options={},
        layout_name="nf4",
        quant_method="bitsandbytes",
        weights={
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
        },
        block=(1, BLOCK),
        choose=lambda weight, absmax: Scales(block_absmax(grouped(weight, BLOCK), dim=2)),
        encode=_encode,
        decode=_decode,
        multiplier=lambda scales: scales.scale.clamp(min=torch.finfo(torch.float32).tiny),  # not 0 / 0
        nearest=_nearest,
        pack=_pack,
        constants=_constants,
        unpack=_unpack,
        layout=_layout,
        once=("weight.quant_map", STATE),
        problem=partial(column_problem, BLOCK),
    )


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    inverse = 1 / scales.scale.clamp(min=1e-38).unsqueeze(2)  # a product, not a quotient, as in bitsandbytes
    x = grouped(weight.float(), BLOCK) * inverse
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for bound in BOUNDS:
        codes = codes + (x > bound)
    return codes.flatten(1)


def _nearest(x: Tensor) -> Tensor:
    table, bounds = _tables(x.device)
    return table[torch.bucketize(x, bounds)]


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(NF4, device=device), torch.tensor(BOUNDS, device=device)


def _decode(codes: Tensor, scales: Scales) -> Tensor:
    values = _tables(codes.device)[0][codes.int()]
    return (grouped(values, BLOCK) * scales.scale.unsqueeze(2)).flatten(1)


def _pack(codes: Tensor, scales: Scales) -> dict[str, Tensor]:
    packed = pack_nibbles(codes)
    swapped = (packed << 4) | (packed >> 4)
    return {"weight": swapped.reshape(-1, 1), "weight.absmax": scales.scale.flatten()}


def _constants(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    state = torch.frombuffer(bytearray(_state(shape, dtype)), dtype=torch.uint8)
    return {"weight.quant_map": torch.tensor(NF4), STATE: state}


def _state(shape: tuple[int, int], dtype: torch.dtype) -> bytes:
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": str(dtype).removeprefix("torch."), "shape": shape}
    return json.dumps(state).encode()


def _unpack(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    packed = tensors["weight"].reshape(shape[0], -1)
    scale = tensors["weight.absmax"].reshape(shape[0], -1)
    return unpack_nibbles((packed << 4) | (packed >> 4)), Scales(scale)


def _layout(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    size = shape[0] * shape[1]
    return {
        "weight": Spec(torch.uint8, (size // 2, 1)),
        "weight.absmax": Spec(torch.float32, (size // BLOCK,)),
        "weight.quant_map": Spec(torch.float32, (len(NF4),)),
        STATE: Spec(torch.uint8, (len(_state(shape, dtype)),)),
    }
