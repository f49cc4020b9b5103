"""The grids of values that codes stand for, and rounding onto them: E4M3, E2M1, integers, E8M0 exponents.

Every function is elementwise, pure, float32 inside, rounds ties to even, and gives the same bytes eager and compiled.
That decides how some are written. `round_to` works on bits, because a compiler may drop a narrowing cast that is
widened at once. `e2m1` and the compiled path of `e4m3` are float arithmetic: inductor casts to float8, and float32 to
its bits, one element at a time on AVX2 (2 to 4 times slower), and eager `torch.where` costs 20 additions.

Sources: OCP 8-bit floating point (OFP8) 1.0 for E4M3; OCP Microscaling formats (MX) 1.0 for E2M1 and E8M0.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "E2M1",
    "E2M1_MAX",
    "E4M3_MAX",
    "absmax_scale",
    "block_absmax",
    "e2m1",
    "e2m1_nearest",
    "e2m1_values",
    "e4m3",
    "e4m3_nearest",
    "e4m3_values",
    "e8m0_values",
    "grouped",
    "integers",
    "integers_nearest",
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


def absmax_scale(largest: Tensor, half_range: float, dtype: torch.dtype) -> Tensor:
    """Scale that puts `largest` on the end of a grid reaching to `half_range`, in the dtype it is stored in.

    Zeros (an all-zero block, or one too small for the dtype) become the dtype's epsilon, as in compressed-tensors, so
    that dividing by the scale gives a number. `largest` is float32, NaN and inf stay.
    """
    scale = round_to(largest / half_range, dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale).to(dtype)


def block_absmax(x: Tensor, *, dim: int, keepdim: bool = False) -> Tensor:
    """float32 largest magnitude along `dim`; NaN where there is one.

    Without their sign bits floats order as integers do, NaN last, and eager torch reduces those 2 to 7 times faster.
    """
    if torch.compiler.is_compiling():
        return x.abs().amax(dim=dim, keepdim=keepdim).float()
    bits = torch.int16 if x.element_size() == 2 else torch.int32
    magnitude = x.view(bits) & torch.iinfo(bits).max
    return magnitude.amax(dim=dim, keepdim=keepdim).view(x.dtype).float()


def largest_magnitude(weight: Tensor) -> Tensor:
    """float32 scalar, the absmax of a whole tensor; NaN if it holds one. One pass, no temporary of its size."""
    low, high = weight.aminmax()
    return torch.maximum(-low, high).float()


def integers(x: Tensor, bits: int) -> Tensor:
    """int8 codes of float32 `x`: nearest integer in [-2^(bits-1), 2^(bits-1) - 1]."""
    return integers_nearest(x, bits).to(torch.int8)


def integers_nearest(x: Tensor, bits: int) -> Tensor:
    """The same as float32."""
    half = 1 << (bits - 1)
    return x.clamp(-half, half - 1).round()


def e4m3(x: Tensor) -> Tensor:
    """uint8 bits of float8_e4m3fn for float32 `x`, saturating at ±448; the sign of zero is kept, NaN stays NaN."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    if not torch.compiler.is_compiling():
        return x.to(torch.float8_e4m3fn).view(torch.uint8)
    code = _e4m3_code(x.abs()) + (64 - torch.copysign(torch.full_like(x, 64), x))
    return torch.where(x == x, code, 127).to(torch.uint8)


def e4m3_nearest(x: Tensor) -> Tensor:
    """float32 `x` rounded to values of E4M3, saturating at ±448."""
    return e4m3_values(e4m3(x))


def e4m3_values(codes: Tensor) -> Tensor:
    """float32 values of E4M3 bits."""
    return codes.view(torch.float8_e4m3fn).float()


def e2m1(x: Tensor) -> Tensor:
    """uint8 codes 0..15 of float32 `x`, saturating at ±6; bit 3 is set below zero, also where that rounds to zero."""
    halves, ones, twos = _e2m1_steps(x.abs())
    return (halves + ones + twos - x.sign().clamp(max=0) * 8).to(torch.uint8)


def e2m1_nearest(x: Tensor) -> Tensor:
    """float32 `x` rounded to values of E2M1, saturating at ±6."""
    halves, ones, twos = _e2m1_steps(x.abs())
    return torch.copysign(twos.add_(twos).add_(ones).add_(halves, alpha=0.5), x)


def _e2m1_steps(size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many steps of 0.5 up to 2, of 1 up to 4 and of 2 up to 6 the value nearest to `size` is made of."""
    halves = (size.clamp(max=2) * 2).round()
    ones = (size.clamp(2, 4) - 2).round()
    twos = (size.clamp(4, E2M1_MAX) * 0.5 - 2).round()
    return halves, ones, twos


def _e4m3_code(size: Tensor) -> Tensor:
    """Exponent and mantissa, read as one integer, of the E4M3 value nearest to `size` in [0, 448]; as float32.

    Below 2^-5 the grid is even, 2^-9 apart; every doubling from there on adds 1 to the exponent, 8 to the code. `size`
    is halved, exactly, until it lies below 2^-5, by 8, 4, 2, 1 doublings as they fit.
    """
    code = torch.zeros_like(size)
    for doublings in (8, 4, 2, 1):
        fits = size >= 2.0 ** (doublings - 6)
        code = torch.where(fits, code + 8.0 * doublings, code)
        size = torch.where(fits, size * 2.0**-doublings, size)
    return code + (size * 2.0**9).round()


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of E2M1 codes 0..15."""
    table: Tensor = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
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
