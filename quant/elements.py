"""The grids of values that codes stand for, and rounding onto them: E4M3, E2M1, integers, E8M0 exponents.

Every function is elementwise, pure, float32 inside, and rounds ties to even. Two of them are written with integer
operations on the bits of float32 because the obvious way differs between eager and compiled code: `round_to` (a
compiler may drop a narrowing cast that is widened at once) and the compiled path of `e4m3` (inductor converts to
float8 one element at a time on AVX2). Sources: OCP 8-bit floating point (OFP8) 1.0 for E4M3; OCP Microscaling (MX) 1.0
for E2M1 and E8M0.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "E2M1",
    "E2M1_MAX",
    "E4M3_MAX",
    "absmax_scale",
    "e2m1",
    "e2m1_values",
    "e4m3",
    "e8m0_values",
    "grouped",
    "integers",
    "largest_magnitude",
    "mx_exponent",
    "round_to",
]

E4M3_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 is the sign
E2M1_MAX = 6.0

EXPONENT_BITS = 23  # width of float32's mantissa, so its exponent starts here
INF_BITS = 0x7F800000


def grouped(x: Tensor, size: int) -> Tensor:
    """(O, I) seen as (O, I/size, size), to compute with one scale per `size` columns; fewer columns are one group."""
    return x.reshape(x.shape[0], -1, min(size, x.shape[1]))


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `x` rounded to the nearest value of bfloat16, float16 or float32; stays float32."""
    if dtype is torch.float32:
        return x
    if dtype is not torch.bfloat16:
        return x.to(dtype).float()
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def absmax_scale(absmax: Tensor, half_range: float, dtype: torch.dtype) -> Tensor:
    """Scale that puts `absmax` on the end of a grid reaching to `half_range`, in the dtype it is stored in.

    Zeros (an all-zero block, or one too small for the dtype) become the dtype's epsilon, as in compressed-tensors, so
    that dividing by the scale gives a number. `absmax` is float32, NaN and inf stay.
    """
    scale = round_to(absmax / half_range, dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale).to(dtype)


def largest_magnitude(weight: Tensor) -> Tensor:
    """float32 scalar, the absmax of a whole tensor; NaN if it holds one. One pass, no temporary of its size."""
    low, high = weight.aminmax()
    return torch.maximum(-low, high).float()


def integers(x: Tensor, bits: int) -> Tensor:
    """int8 codes of float32 `x`: nearest integer in [-2^(bits-1), 2^(bits-1) - 1]."""
    half = 1 << (bits - 1)
    return x.clamp(-half, half - 1).round().to(torch.int8)


def e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn of float32 `x`, saturating at ±448; the sign of zero is kept, NaN stays NaN."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    return _e4m3_from_bits(x) if torch.compiler.is_compiling() else x.to(torch.float8_e4m3fn)


def _e4m3_from_bits(x: Tensor) -> Tensor:
    """The same bytes as the cast for |x| <= 448 and NaN, in integer operations that vectorize."""
    bits = x.view(torch.int32)
    size = bits & 0x7FFFFFFF
    # normal: move the exponent's bias from 127 to 7 and round 23 mantissa bits to 3
    normal = (size - (120 << EXPONENT_BITS) + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # below 2^-6 the grid is even, 2^-9 apart, which is the distance of float32 values at 2^14
    subnormal = (x.abs() + 2.0**14).view(torch.int32) - (141 << EXPONENT_BITS)
    code = torch.where(size < 121 << EXPONENT_BITS, subnormal, normal)
    code = torch.where(size > INF_BITS, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def e2m1(x: Tensor) -> Tensor:
    """uint8 codes 0..15 of float32 `x`, saturating at ±6; bit 3 is set below zero, also where that rounds to zero."""
    size = x.abs().clamp(max=E2M1_MAX)
    bits = size.view(torch.int32)
    # from 1 up a float with one mantissa bit; below, the grid is even, 0.5 apart, as float32 is at 2^22
    normal = (bits - (126 << EXPONENT_BITS) + 0x1FFFFF + ((bits >> 22) & 1)) >> 22
    subnormal = (size + 2.0**22).view(torch.int32) - (149 << EXPONENT_BITS)
    code = torch.where(size < 1, subnormal, normal)
    return torch.where(x < 0, code | 8, code).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes 0..15."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[codes.int()]


def mx_exponent(absmax: Tensor, largest: float, rule: str) -> Tensor:
    """Shared exponents of MX blocks as E8M0 bytes: uint8, value 2^(byte - 127); NaN and inf give 255, zero gives 0.

    floor(log2(absmax)) - floor(log2(largest)), one more where the mantissa of `absmax` passes the rule's threshold:

        floor  never (OCP MX 1.0 section 6.3): the largest weights are clipped
        even   from 1.75 on, where rounding to one mantissa bit reaches the next power of two (compressed-tensors)
        ceil   above that of `largest`, so that nothing is clipped: ceil(log2(absmax / largest))

    Args:
        absmax: float32, largest magnitude of each block.
        largest: largest value of the element's grid.
        rule: "floor", "even" or "ceil".
    """
    mantissa, exponent = math.frexp(largest)  # in [0.5, 1)
    carry = {"floor": 0, "even": 1 << 21, "ceil": (1 << 24) - 1 - int(mantissa * (1 << 24))}[rule]
    bits = absmax.view(torch.int32)
    byte = ((bits + carry) >> EXPONENT_BITS) - (exponent - 1)
    return torch.where(bits >= INF_BITS, 255, byte.clamp(min=0)).to(torch.uint8)


def e8m0_values(byte: Tensor) -> Tensor:
    """float32 powers of two 2^(byte - 127); byte 0 is float32's subnormal 2^-127, 255 is NaN."""
    bits = byte.int() << EXPONENT_BITS
    value = torch.where(byte == 0, 1 << 22, bits).view(torch.float32)
    return torch.where(byte == 255, torch.nan, value)
