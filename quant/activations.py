"""The inputs of a quantized linear as an engine's kernel sees them: rounded to the grid, then multiplied back.

An engine that computes with 8- or 4-bit activations rounds every input on the fly. Evaluating the dequantized weights
alone hides that loss (a third to a half of it for 4-bit activations), so the loader puts one of these functions in
front of each such layer. The arithmetic is float32 whatever the input's dtype, as in the kernels: scale from the
largest magnitude of a token or group, divide, round to nearest even, multiply. Equal to compressed-tensors' fake
quantization of a float32 input, bit for bit.

Left out: asymmetric inputs, and outputs. vLLM divides INT8 by 127 where compressed-tensors and we divide by 127.5.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quant.elements import E2M1_MAX, E4M3_MAX, absmax_scale, e8m0_values, mx_exponent

__all__ = [
    "INPUT_SCALES",
    "Quantizer",
    "activation_quantizer",
    "input_scale",
    "input_scale_name",
    "is_emulated",
    "round_e2m1",
]

Quantizer = Callable[[Tensor], Tensor]

TINY_E4M3 = 0.125  # what compressed-tensors takes for a group's E4M3 scale that rounds to zero


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code; beyond 6 saturates; NaN stays NaN.

    The values of `elements.e2m1_values(e2m1(x))` in half the passes, since every token goes through here.
    """
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # the power of two at or below |x|
    step = binade.clamp(min=1) / 2
    return (x / step).round_() * step


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()  # the cast alone does not saturate


def _round_int8(x: Tensor) -> Tensor:
    return x.clamp(-128, 127).round_()


# name -> rounding onto it, and the value its largest magnitude is scaled to
GRIDS: Mapping[str, tuple[Quantizer, float]] = {
    "int8": (_round_int8, 127.5),
    "e4m3": (_round_e4m3, E4M3_MAX),
    "e2m1": (round_e2m1, E2M1_MAX),
}


def _absmax(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(-1, keepdim=True)


def _dynamic(blocks: Tensor, largest: float, stored: Tensor) -> Tensor:
    return absmax_scale(_absmax(blocks), largest, torch.float32)


def _power_of_two(blocks: Tensor, largest: float, stored: Tensor) -> Tensor:
    return e8m0_values(mx_exponent(_absmax(blocks), largest, "even"))


def _two_level(blocks: Tensor, largest: float, stored: Tensor) -> Tensor:
    """NVFP4: E4M3 per group, relative to a float32 divisor of the whole tensor."""
    local = _round_e4m3(stored * (_absmax(blocks) / largest))
    return torch.where(local == 0, TINY_E4M3, local) / stored


def _static(blocks: Tensor, largest: float, stored: Tensor) -> Tensor:
    return stored


@dataclass(frozen=True)
class Kind:
    """How one kind of input is rounded.

    grid   key of GRIDS
    scale  (blocks (..., n), largest of the grid, stored value) -> scale (..., 1)
    stored name of the one value that the checkpoint stores, None where it stores none
    size   the only group size engines have
    """

    grid: str
    scale: Callable[[Tensor, float, Tensor], Tensor]
    stored: str | None = None
    size: int | None = None


# (type, num_bits, strategy, dynamic, scale_dtype) of compressed-tensors' arguments; E8M0 scales are its torch.uint8
KINDS: Mapping[tuple[Any, ...], Kind] = {
    ("int", 8, "token", True, None): Kind("int8", _dynamic),
    ("int", 8, "tensor", False, None): Kind("int8", _static, stored="input_scale"),
    ("float", 8, "token", True, None): Kind("e4m3", _dynamic),
    ("float", 8, "tensor", False, None): Kind("e4m3", _static, stored="input_scale"),
    ("float", 8, "group", True, None): Kind("e4m3", _dynamic, size=128),
    ("float", 8, "group", True, "torch.uint8"): Kind("e4m3", _power_of_two, size=32),
    ("float", 4, "group", True, "torch.uint8"): Kind("e2m1", _power_of_two, size=32),
    ("float", 4, "tensor_group", "local", "torch.float8_e4m3fn"): Kind(
        "e2m1", _two_level, stored="input_global_scale", size=16
    ),
}


def _divisor(absmax: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    return E4M3_MAX * largest / absmax


# stored value -> what it is for a calibrated (absmax, largest of the grid, dtype of the source)
INPUT_SCALES: Mapping[str, Callable[[Tensor, float, torch.dtype], Tensor]] = {
    "input_scale": absmax_scale,
    "input_global_scale": _divisor,
}

LLM_INT8 = "llm_int8_threshold"  # key of the arguments that asks for bitsandbytes' arithmetic


def activation_quantizer(args: Mapping[str, Any], *, scale: Tensor | None = None) -> Quantizer:
    """A function from inputs (..., I) to the inputs an engine multiplies with, same shape and dtype.

    NaN makes its whole token or group NaN. Infinity does too, except under a stored scale, where it saturates as in
    the kernels. Not differentiable.

    Args:
        args: compressed-tensors' QuantizationArgs of `input_activations`, or any with LLM_INT8 among them.
        scale: one value: `input_scale` of static inputs, or NVFP4's divisor `input_global_scale`; None when dynamic.

    Raises:
        ValueError: a kind that is not emulated, or a scale that is missing or not a positive number.
    """
    if LLM_INT8 in args:
        return partial(_llm_int8, float(args[LLM_INT8]))
    kind = _kind(args)
    if kind is None:
        raise ValueError(f"activations of {dict(args)} are not emulated: known are {', '.join(map(str, KINDS))}")
    stored = torch.ones(()) if kind.stored is None else _positive(scale, kind.stored)
    return lambda x: _rounded(x, kind, stored)


def input_scale_name(args: Mapping[str, Any] | None) -> str | None:
    """The tensor that stores the calibrated scale of such inputs; None where there is none."""
    kind = _kind(args or {})
    return kind.stored if kind else None


def input_scale(args: Mapping[str, Any], absmax: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The calibrated scale (1,) of such inputs, in the dtype it is stored in; None where none is stored.

    Args:
        args: compressed-tensors' QuantizationArgs of `input_activations`.
        absmax: float32 scalar, the largest magnitude of the inputs.
        dtype: of the source weight.

    Raises:
        ValueError: inputs that are all zero or not finite, or so small that their scale is.
    """
    kind = _kind(args)
    if kind is None or kind.stored is None:
        return None
    if not bool(absmax.isfinite() & (absmax > 0)):
        raise ValueError(f"the largest of its calibration inputs is {float(absmax)}, not a positive number")
    scale = INPUT_SCALES[kind.stored](absmax.float().reshape(1), GRIDS[kind.grid][1], dtype)
    _positive(scale, kind.stored)
    return scale


def is_emulated(args: Mapping[str, Any]) -> bool:
    """Whether `activation_quantizer` knows this kind of input."""
    return _kind(args) is not None


def _kind(args: Mapping[str, Any]) -> Kind | None:
    names = ("type", "num_bits", "strategy", "dynamic", "scale_dtype")
    kind = KINDS.get(tuple(args.get(name) for name in names))
    if kind is None or not args.get("symmetric", True) or kind.size not in (None, args.get("group_size")):
        return None
    return kind


def _positive(scale: Tensor | None, name: str) -> Tensor:
    if scale is None or scale.numel() != 1:
        raise ValueError(f"the activations need {name}, one value")
    value = scale.float().reshape(())
    if not bool(value.isfinite() & (value > 0)):
        raise ValueError(f"{name} is {value.item()}, not a positive number")
    return value


def _rounded(x: Tensor, kind: Kind, stored: Tensor) -> Tensor:
    onto, largest = GRIDS[kind.grid]
    blocks = x.float() if kind.size is None else x.float().reshape(*x.shape[:-1], -1, kind.size)
    scale = kind.scale(blocks, largest, stored)
    return (onto(blocks / scale) * scale).reshape(x.shape).to(x.dtype)


def _llm_int8(threshold: float, x: Tensor) -> Tensor:
    """LLM.int8() (arXiv 2208.07339 section 3.2): columns in which any token reaches the threshold stay as they are.

    The columns are those of the whole call, as in bitsandbytes: what else is in the batch changes the result a little.
    """
    half = x.half().float().reshape(-1, x.shape[-1])
    outliers = half.abs() >= threshold
    body = half.masked_fill(outliers, 0)
    largest = body.abs().amax(-1, keepdim=True)
    body = _round_int8(body * (127 / largest)).nan_to_num(0) * largest / 127  # 0 * inf in an all-zero token
    return torch.where(outliers.any(0), x.reshape(body.shape).float(), body).reshape(x.shape).to(x.dtype)
