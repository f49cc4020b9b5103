"""Keys and values as they come back out of a quantized cache: quantized, and at once dequantized.

Each function takes (B, H, T, D): batch, key-value heads, tokens, head dimension, keys after the rotary embedding, and
returns the same shape and dtype; the arithmetic is float32. The second argument is a stored scale, which only schemes
with calibrated scales use. A token's result depends on no other token, except in `int4_by_channel`.

Sources: vLLM's quantization_utils (FP8: x / scale, saturating); KIVI, arXiv 2402.02750, section 3 (keys per channel,
values per token); OCP Microscaling formats 1.0 for E2M1.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from quant.activations import round_e2m1
from quant.elements import E2M1_MAX, E4M3_MAX, absmax_scale, integers, round_to

__all__ = ["Rounding", "fp8", "int4_by_channel", "int4_by_token", "int8", "nvfp4"]

Rounding = Callable[[Tensor, Tensor | None], Tensor]

LEVELS: Final = 15  # steps between the least and the largest of a group's 16 codes
NVFP4_BLOCK: Final = 16
SMALLEST_E4M3: Final = 2.0**-9


def fp8(x: Tensor, scale: Tensor | None) -> Tensor:
    """E4M3 times `scale`, (1,) or (H, 1, 1); what lies beyond 448 scales is clipped.

    Raises:
        ValueError: no scale.
    """
    if scale is None:
        raise ValueError("an FP8 cache needs a scale")
    scale = scale.float()
    return (_e4m3(x.float() / scale) * scale).to(x.dtype)


def int8(x: Tensor, _: Tensor | None = None) -> Tensor:
    """Symmetric, one float32 scale per token and head: absmax / 127."""
    wide = x.float()
    scale = absmax_scale(wide.abs().amax(-1, keepdim=True), 127.0, torch.float32)
    return (integers(wide / scale, 8).float() * scale).to(x.dtype)


def int4_by_token(x: Tensor, size: int) -> Tensor:
    """Asymmetric, one scale and minimum per token and `size` channels."""
    return _asymmetric(x.reshape(*x.shape[:-1], -1, size), -1).reshape(x.shape)


def int4_by_channel(x: Tensor, size: int) -> Tensor:
    """Asymmetric, one scale and minimum per channel and `size` tokens, counted from the first; T a multiple of it."""
    return _asymmetric(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]), -2).reshape(x.shape)


def nvfp4(x: Tensor, _: Tensor | None = None) -> Tensor:
    """E2M1 with one E4M3 scale per 16 channels, absmax / 6; the global scale is 1."""
    blocks = x.float().reshape(*x.shape[:-1], -1, NVFP4_BLOCK)
    scale = _e4m3(blocks.abs().amax(-1, keepdim=True) / E2M1_MAX).clamp(min=SMALLEST_E4M3)
    return (round_e2m1(blocks / scale) * scale).reshape(x.shape).to(x.dtype)


def _e4m3(x: Tensor) -> Tensor:
    """Nearest value of E4M3; the cast alone would give NaN beyond the end."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _asymmetric(groups: Tensor, dim: int) -> Tensor:
    """4-bit codes between the extremes along `dim`; scale and minimum are float16, as they are stored."""
    wide = groups.float()
    low, high = wide.amin(dim, keepdim=True), wide.amax(dim, keepdim=True)
    scale = absmax_scale(high - low, LEVELS, torch.float16).float()
    low = round_to(low, torch.float16)
    codes = ((wide - low) / scale).round().clamp(0, LEVELS)
    return (codes * scale + low).to(groups.dtype)
