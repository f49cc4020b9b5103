"""The inputs of a quantized linear as an engine's kernel sees them: rounded to the grid, then multiplied back.

An engine that computes with 8- or 4-bit activations rounds every input on the fly. Evaluating the dequantized weights
alone hides that loss (a third to a half of it for 4-bit activations), so the loader puts one of these functions in
front of each such layer. The arithmetic is float32 whatever the input's dtype, as in the kernels: scale from the
largest magnitude of a token or group, divide, round to nearest even, multiply. Equal to compressed-tensors' fake
quantization of a float32 input, bit for bit.

Left out: asymmetric inputs, and outputs. vLLM divides INT8 by 127 where compressed-tensors and we divide by 127.5.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["activation_quantizer", "round_e2m1"]

Quantizer = Callable[[Tensor], Tensor]
Round = Callable[[Tensor], Tensor]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
INT8_HALF_RANGE = 127.5
MX_OFFSET = {"e2m1": 2, "e4m3": 8}  # exponent of the grid's largest power of two
TINY_E4M3 = 0.125  # what compressed-tensors stores for a group scale that rounds to zero


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code; beyond 6 saturates; NaN stays NaN."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (x / step).round_() * step


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()  # the cast alone would make NaN of 449


def _round_int8(x: Tensor) -> Tensor:
    return x.clamp(-128, 127).round_()


GRIDS: dict[str, tuple[Round, float]] = {
    "int8": (_round_int8, INT8_HALF_RANGE),
    "e4m3": (_round_e4m3, E4M3_MAX),
    "e2m1": (round_e2m1, E2M1_MAX),
}


def _absmax_scale(blocks: Tensor, grid: str) -> Tensor:
    """(..., n) -> (..., 1): the scale that puts the largest magnitude on the end of the grid."""
    scale = blocks.abs().amax(-1, keepdim=True) / GRIDS[grid][1]
    return scale.where(scale != 0, torch.finfo(torch.float32).eps)  # an all-zero block


def _mx_scale(blocks: Tensor, grid: str) -> Tensor:
    """(..., 32) -> (..., 1): the power of two of OCP MX, exponent rounded up from a mantissa of 1.75 on."""
    bits = blocks.abs().amax(-1, keepdim=True).view(torch.int32)
    exponent = (bits + (1 << 21)) >> 23  # biased by 127; 255 is inf or NaN and must stay so
    byte = torch.where(exponent >= 255, 255, (exponent - MX_OFFSET[grid]).clamp(min=0))
    return torch.where(byte > 0, byte << 23, 1 << 22).view(torch.float32)  # 2 ** (byte - 127), 2 ** -127 is denormal


def _per_token(grid: str, args: Mapping[str, Any], scale: Tensor | None) -> Quantizer:
    return lambda x: _fake_quantize(x, grid, _absmax_scale(x, grid))


def _per_group(grid: str, args: Mapping[str, Any], scale: Tensor | None) -> Quantizer:
    size = int(args["group_size"])
    is_mx = str(args.get("scale_dtype")) == "torch.uint8"
    if is_mx and size != 32:
        raise ValueError(f"a power-of-two scale needs groups of 32, not {size}")
    if grid == "e2m1" and not is_mx:
        raise ValueError("4-bit float groups need a power-of-two scale (scale_dtype torch.uint8)")
    choose = _mx_scale if is_mx else _absmax_scale

    def quantize(x: Tensor) -> Tensor:
        blocks = x.reshape(*x.shape[:-1], -1, size)
        return _fake_quantize(blocks, grid, choose(blocks, grid)).flatten(-2)

    return quantize


def _nvfp4(grid: str, args: Mapping[str, Any], scale: Tensor | None) -> Quantizer:
    """Two-level scaling: e4m3 per group of 16, relative to a calibrated float32 divisor of the whole tensor."""
    size, global_scale = int(args["group_size"]), _needed(scale, "input_global_scale")

    def quantize(x: Tensor) -> Tensor:
        blocks = x.reshape(*x.shape[:-1], -1, size)
        local = _round_e4m3(global_scale * (blocks.abs().amax(-1, keepdim=True) / E2M1_MAX))
        local = local.where(local != 0, TINY_E4M3)
        return _fake_quantize(blocks, grid, local / global_scale).flatten(-2)

    return quantize


def _static(grid: str, args: Mapping[str, Any], scale: Tensor | None) -> Quantizer:
    fixed = _needed(scale, "input_scale")
    return lambda x: _fake_quantize(x, grid, fixed)


def _needed(scale: Tensor | None, name: str) -> Tensor:
    if scale is None or scale.numel() != 1:
        raise ValueError(f"the activations need {name}, one value")
    value = scale.float().reshape(())
    if not bool(torch.isfinite(value) & (value > 0)):
        raise ValueError(f"{name} is {value.item()}, not a positive number")
    return value


def _fake_quantize(x: Tensor, grid: str, scale: Tensor) -> Tensor:
    return GRIDS[grid][0](x / scale) * scale


# (type, bits, strategy, dynamic) of compressed-tensors' arguments -> grid, and where its scale comes from
KINDS: dict[
    tuple[str, int, str, bool | str], tuple[str, Callable[[str, Mapping[str, Any], Tensor | None], Quantizer]]
] = {
    ("int", 8, "token", True): ("int8", _per_token),
    ("int", 8, "tensor", False): ("int8", _static),
    ("float", 8, "token", True): ("e4m3", _per_token),
    ("float", 8, "tensor", False): ("e4m3", _static),
    ("float", 8, "group", True): ("e4m3", _per_group),
    ("float", 4, "group", True): ("e2m1", _per_group),
    ("float", 4, "tensor_group", "local"): ("e2m1", _nvfp4),
}


def activation_quantizer(args: Mapping[str, Any], *, scale: Tensor | None = None) -> Quantizer:
    """A function from inputs (..., I) to the inputs an engine multiplies with, same shape and dtype.

    NaN makes its whole token or group NaN. Infinity does too, except under a static or NVFP4 scale, where it saturates
    as in the kernels. Not differentiable.

    Args:
        args: compressed-tensors' QuantizationArgs of `input_activations`.
        scale: one value: `input_scale` of static activations, `input_global_scale` of NVFP4; None when dynamic.

    Raises:
        ValueError: a kind that is not emulated, or a scale that is missing or not a positive number.
    """
    kind = (args["type"], args["num_bits"], args["strategy"], args.get("dynamic", False))
    if kind not in KINDS or not args.get("symmetric", True):
        raise ValueError(f"activations of {dict(args)} are not emulated: known are {', '.join(map(str, KINDS))}")
    grid, make = KINDS[kind]
    quantize = make(grid, args, scale)
    return lambda x: quantize(x.float()).to(x.dtype)
