"""INT8 weights per output channel in bitsandbytes' layout, for its LLM.int8() kernels (arXiv 2208.07339).

W~ = SCB / 127 * q with SCB = absmax. Stored as bitsandbytes' loader in transformers reads it: `weight` int8 (O, I),
`SCB` float32 (O,), `weight_format` uint8 scalar 0 (row-major). At run time inputs are INT8 per token, except columns
with a magnitude of `llm_int8_threshold` or more, which stay in 16 bits. The arithmetic is ours and equal to
bitsandbytes' in every byte, but for a row so small that 127 / SCB overflows, zeros above all: its codes are undefined
there and zero here.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.elements import block_absmax, integers, integers_nearest
from quant.format import Format, Scales

__all__ = ["bnb_int8"]

ONE_127TH = 7.874015718698502e-3  # bitsandbytes' float32 constant; a division would differ in the last bit


def bnb_int8() -> Format:
    """INT8 for LLM.int8()."""
    return Format(
        name="bnb-int8",
        options={},
        layout_name="llm_int8",
        quant_method="bitsandbytes",
        weights={"load_in_8bit": True, "llm_int8_threshold": 6.0},
        activations={"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
        block=(1, None),
        choose=lambda weight, absmax: Scales(block_absmax(weight, dim=1, keepdim=True)),
        encode=_encode,
        decode=lambda codes, scales: codes * scales.scale * ONE_127TH,
        multiplier=lambda scales: (scales.scale * ONE_127TH).clamp(
            min=torch.finfo(torch.float32).tiny
        ),  # zeros are divided by it
        nearest=partial(integers_nearest, bits=8),
        pack=lambda codes, scales: {"weight": codes, "SCB": scales.scale.flatten()},
        constants=lambda shape, dtype: {"weight_format": torch.tensor(0, dtype=torch.uint8)},
        unpack=_unpack,
        layout=_layout,
        once=("weight_format",),
    )


def _encode(weight: Tensor, scales: Scales) -> Tensor:
    inverse = 127 / scales.scale
    return integers(weight.float() * torch.where(inverse.isinf(), 0, inverse), 8)


def _unpack(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    return tensors["weight"], Scales(tensors["SCB"].reshape(-1, 1))


def _layout(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Spec]:
    return {
        "weight": Spec(torch.int8, shape),
        "SCB": Spec(torch.float32, (shape[0],)),
        "weight_format": Spec(torch.uint8, ()),
    }
