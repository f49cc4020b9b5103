"""INT8 weights with one scale per output channel, and INT8 inputs scaled per token at run time (W8A8).

W~ = scale * q with scale = absmax / 127.5 and q in [-128, 127]. Stored as compressed-tensors' `int-quantized`:
`weight` int8 (O, I), `weight_scale` (O, 1) in the source's dtype.
"""

from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import absmax_scale, block_absmax, integers, integers_nearest
from quant.format import Format, Scales
from quant.packing import pack_int8, unpack_bytes

__all__ = ["int8"]


def int8() -> Format:
    """INT8 per channel."""
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    return Format(
        name="int8",
        options={},
        layout_name="int-quantized",
        weights={**shared, "strategy": "channel", "dynamic": False},
        activations={**shared, "strategy": "token", "dynamic": True},
        block=(1, None),
        choose=_choose,
        encode=lambda weight, scales: integers(weight.float() / scales.scale.float(), 8),
        decode=lambda codes, scales: codes.float() * scales.scale.float(),
        multiplier=lambda scales: scales.scale.float(),
        nearest=partial(integers_nearest, bits=8),
        pack=pack_int8,
        unpack=unpack_bytes,
        layout=lambda shape, dtype: {"weight": Spec(torch.int8, shape), "weight_scale": Spec(dtype, (shape[0], 1))},
    )


def _choose(weight: Tensor, absmax: Tensor | None) -> Scales:
    return Scales(absmax_scale(block_absmax(weight, dim=1, keepdim=True), 127.5, weight.dtype))
