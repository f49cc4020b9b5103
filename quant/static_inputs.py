"""Calibrated scales of inputs: the range of what a block's linears read, and the scales that are stored for it.

Ranges are those of the inputs that the already quantized blocks produce, taken in a pass of their own before a block is
quantized, because the experts of a layer share one scale: vLLM takes the largest of theirs. Layers with the same input,
which engines fuse, share theirs by construction.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compress.errors import Refused
from compress.walk_block import Block, batches, check_finite, hooked
from quant.activations import Quantizer, activation_quantizer, input_scale, input_scale_name
from quant.format import Format

__all__ = ["input_ranges", "input_rounding", "input_scales"]

EXPERT = re.compile(r"\.experts\.\d+\.")


def input_scales(block: Block, formats: Mapping[str, Format], dtype: torch.dtype) -> dict[str, Tensor]:
    """The scales to store, by tensor name, (1,) each; none where no format stores one.

    Args:
        block: as its inputs will be read, before its linears are quantized.
        formats: of the linears that are quantized, by the checkpoint's name.
        dtype: of the source weights.

    Raises:
        InputError: an input that is not finite.
        Refused: inputs that are all zero.
    """
    static = {name: suffix for name, fmt in formats.items() if (suffix := input_scale_name(fmt.activations))}
    ranges = input_ranges(block, [*static]) if static else {}
    return {f"{name}.{suffix}": _scale(name, formats[name], ranges[name], dtype) for name, suffix in static.items()}


def _scale(name: str, fmt: Format, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    try:
        scale = input_scale(fmt.activations or {}, absmax, dtype)
    except ValueError as error:
        raise Refused(f"{name} cannot have a static input scale: {error}; add it to ignore") from error
    assert scale is not None  # only formats that store one are asked
    return scale


def input_rounding(name: str, fmt: Format | None, tensors: Mapping[str, Tensor]) -> Quantizer | None:
    """What an engine does to the inputs of a linear, given its stored tensors; None for 16-bit inputs."""
    if fmt is None or not fmt.activations:
        return None
    return activation_quantizer(fmt.activations, scale=tensors.get(f"{name}.{input_scale_name(fmt.activations)}"))


def input_ranges(block: Block, names: Sequence[str]) -> dict[str, Tensor]:
    """Largest magnitude, float32 scalar, of the inputs of each linear over all tokens of all ranks.

    Raises:
        InputError: it is not finite.
    """
    shared = {name: EXPERT.sub(".experts.*.", name) for name in names}
    found = dict.fromkeys(shared.values(), torch.zeros((), device=block.device))
    hooks = {block.linears[name]: partial(_note, found, shared[name]) for name in names}
    with hooked(hooks), torch.no_grad():
        for batch in batches(block.inputs):
            block.forward(batch)
    largest = torch.stack([*found.values()]).nan_to_num(nan=torch.inf)  # a maximum over ranks may drop NaN
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found = dict(zip(found, largest, strict=True))
    for name in names:
        check_finite(name, found[shared[name]])
    return {name: found[key] for name, key in shared.items()}


def _note(found: dict[str, Tensor], key: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
    if args[0].numel():
        found[key] = torch.maximum(found[key], args[0].abs().amax().float())
