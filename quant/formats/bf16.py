"""bfloat16: a cast, for checkpoints in float32 or float16 and as the format of layers that are left alone."""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.tensor_file import Spec
from quant.format import Format, Scales

__all__ = ["bf16"]


def bf16() -> Format:
    """bfloat16 weights; config.json needs no entry."""
    return Format(
        name="bf16",
        options={},
        layout_name="dense",
        quant_method=None,
        weights=None,
        block=(None, None),
        choose=_choose,
        encode=lambda weight, scales: weight.to(torch.bfloat16),
        decode=lambda codes, scales: codes.float(),
        multiplier=lambda scales: torch.ones(1, 1, device=scales.scale.device),
        nearest=lambda x: x.to(torch.bfloat16).float(),
        pack=lambda codes, scales: {"weight": codes},
        unpack=_unpack,
        layout=lambda shape, dtype: {"weight": Spec(torch.bfloat16, shape)},
    )


def _choose(weight: Tensor, absmax: Tensor | None) -> Scales:
    """No scale is stored; the largest magnitude as bfloat16 stands in, so that overflow is seen as non-finite."""
    return Scales(weight.abs().amax().reshape(1).to(torch.bfloat16))


def _unpack(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    return tensors["weight"], Scales(torch.ones(1, dtype=torch.bfloat16))
