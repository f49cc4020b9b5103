"""What a number format is: a grid of values, the block of weights that shares one scale, and its bytes.

A format defines the grid; a method chooses codes and scales. Every method works on the first five verbs alone, so
that every method works with every format; `pack` and `unpack` know the bytes on disk.

    choose(W)              -> Scales      round-to-nearest scales, in the dtype they are stored in
    encode(W, scales)      -> codes       nearest code of every weight
    decode(codes, scales)  -> W~          the weight an engine computes with, float32
    multiplier(scales)     -> m           what a code's value is multiplied with, float32, one per block
    nearest(x)             -> x~          float32 rounded to the grid
    pack(codes, scales)    -> tensors     the bytes of the checkpoint that depend on values, by tensor suffix
    constants(shape)       -> tensors     the bytes that depend on the shape alone
    unpack(tensors, shape) -> codes, scales

Who rounds the same weights many times needs no codes, only what they decode to: W~ = (nearest(W / m + z) - z) m, z the
zero point or 0. bitsandbytes' formats, which multiply by an inverse, may differ from it in a last bit.

O = out_features (rows), I = in_features (columns); weights are (O, I).

Weights larger than memory are processed in runs of rows. `choose`, `encode` and `pack` take any run whose length is a
multiple of `ROWS` (the last one may be shorter): tensors follow each other along dim 0, except those of `Format.once`,
which come out the same for every run. `join` does it in memory; a streaming writer appends bytes instead.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.tensor_file import Spec

__all__ = [
    "ROWS",
    "Format",
    "Scales",
    "column_problem",
    "dequantize",
    "join",
    "quantize",
    "require_finite",
    "stored",
]

ROWS = 128  # every block of every format ends at a multiple of this many rows


@dataclass(frozen=True)
class Scales:
    """The numbers that turn codes into weights, in the dtypes that are stored.

    scale        one per block of `Format.block`: (O / rows, I / columns), rounded up where rows are ragged; (1,) where
                 the whole weight is one block
    zero_point   same shape, int8, for asymmetric integers
    global_scale float32 (1,), NVFP4's divisor, shared by layers an engine fuses
    """

    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format with its options bound; every field a pure function or plain data."""

    name: str
    options: Mapping[str, Any]  # every option with the value that is bound
    layout_name: str  # the layout as `quant_method` names it, e.g. "pack-quantized"
    quant_method: str | None = "compressed-tensors"  # of config.json's quantization_config; None: no such entry
    weights: Mapping[str, Any] | None  # minimal QuantizationArgs of the weights
    activations: Mapping[str, Any] | None = None  # minimal QuantizationArgs of the inputs, None = 16-bit activations
    block: tuple[int | None, int | None]  # rows x columns that share one scale; None = all of them
    absmax_scope: str | None = None  # "fused": choose() needs the absmax of all layers that engines fuse
    choose: Callable[[Tensor, Tensor | None], Scales]  # (W rows, absmax scalar or None)
    encode: Callable[[Tensor, Scales], Tensor]
    decode: Callable[[Tensor, Scales], Tensor]
    multiplier: Callable[[Scales], Tensor]  # float32, (rows of blocks, columns of blocks)
    nearest: Callable[[Tensor], Tensor]  # float32 to float32, saturating
    pack: Callable[[Tensor, Scales], dict[str, Tensor]]
    constants: Callable[[tuple[int, int], torch.dtype], dict[str, Tensor]] = lambda shape, dtype: {}
    unpack: Callable[[Mapping[str, Tensor], tuple[int, int]], tuple[Tensor, Scales]]
    layout: Callable[[tuple[int, int], torch.dtype], dict[str, Spec]]  # dtype of the source weight
    once: Collection[str] = ()  # suffixes of the layout that are the same for every run of rows
    problem: Callable[[tuple[int, int]], str | None] = lambda shape: None  # why a weight of this shape is refused


def quantize(weight: Tensor, fmt: Format, absmax: Tensor | None = None) -> dict[str, Tensor]:
    """Round-to-nearest: the tensors to store for a whole `weight`, by suffix ("weight", "weight_scale", ...).

    Args:
        weight: (O, I), bfloat16, float16 or float32, finite.
        fmt: the format.
        absmax: float32 scalar, largest magnitude over `fmt.absmax_scope`; None where the format needs none.

    Raises:
        ValueError: a weight or a scale is NaN or infinite, or `absmax` is smaller than a weight.
    """
    scales = fmt.choose(weight, absmax)
    require_finite(scales)
    return stored(fmt.encode(weight, scales), scales, fmt, (weight.shape[0], weight.shape[1]), weight.dtype)


def stored(codes: Tensor, scales: Scales, fmt: Format, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors to store for codes and scales that a method chose; `dtype` is the source weight's."""
    return fmt.pack(codes, scales) | fmt.constants(shape, dtype)


def join(
    runs: Sequence[Mapping[str, Tensor]], fmt: Format, shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of the whole weight (O, I) from those packed for its runs of rows, in order."""
    joined = {
        suffix: runs[0][suffix] if suffix in fmt.once else torch.cat([run[suffix] for run in runs])
        for suffix in runs[0]
    }
    return joined | fmt.constants(shape, dtype)


def dequantize(tensors: Mapping[str, Tensor], fmt: Format, shape: tuple[int, int]) -> Tensor:
    """The float32 weight (O, I) that an engine computes with, from the stored tensors."""
    return fmt.decode(*fmt.unpack(tensors, shape))


def require_finite(scales: Scales) -> None:
    """Raise ValueError unless every scale is a number: NaN and inf in a weight always reach its block's scale."""
    for label, tensor in (("scale", scales.scale), ("global scale", scales.global_scale)):
        if tensor is not None and not _is_finite(tensor):
            raise ValueError(f"a {label} is not finite, so the weight holds NaN or inf, or absmax is not its largest")


def _is_finite(scale: Tensor) -> bool:
    if scale.dtype is torch.uint8:  # E8M0: 255 is its NaN
        return bool((scale != 255).all())
    return bool(scale.float().isfinite().all())


def column_problem(multiple: int, shape: tuple[int, int]) -> str | None:
    """`Format.problem` of formats with one scale per `multiple` columns."""
    return None if shape[1] % multiple == 0 else f"its {shape[1]} columns are not a multiple of {multiple}"
