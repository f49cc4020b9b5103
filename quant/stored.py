"""A checkpoint's tensors sorted into quantized modules and plain tensors, each turned into a weight only when asked.

What the configuration says and what the files hold must agree in every module: a scale without a format, a format
without its scales, a tensor of another shape or of a kind that is not read are errors here, before a model is built.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, Refused
from compress.modules import modules
from compress.tensor_file import Spec, TensorInfo
from quant.activations import INPUT_SCALES
from quant.format import Format, dequantize
from quant.formats import FORMATS, make_format
from quant.scheme import formats_of

__all__ = ["Stored", "StoredModule", "sort_tensors"]

KV_SCALES = ("k_scale", "v_scale", "q_scale", "k_global_scale", "v_global_scale")
NOT_READ = ("weight_g_idx", "weight_zero_point", "weight_scale_inv", "input_zero_point", "output_scale")
# how a file states (O, I) where a packed weight does not show it
SHAPES: Mapping[str, Callable[[Tensor], list[int]]] = {
    "weight_shape": lambda tensor: list(tensor.tolist()),
    "weight.quant_state.bitsandbytes__nf4": lambda tensor: list(json.loads(bytes(tensor.tolist()))["shape"]),
}
WIDTH = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 32, torch.float64: 64}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WIDTH}


@dataclass(frozen=True)
class StoredModule:
    """One quantized matrix: its format, (O, I), and where its tensors are, by suffix."""

    name: str
    fmt: Format
    shape: tuple[int, int]
    tensors: Mapping[str, str]

    def weight(self, checkpoint: Checkpoint) -> Tensor:
        """float32 (O, I), exactly as an engine computes with it."""
        return dequantize(
            {suffix: checkpoint.read(name) for suffix, name in self.tensors.items()}, self.fmt, self.shape
        )


@dataclass(frozen=True)
class Stored:
    """A checkpoint sorted.

    modules       quantized modules by name
    plain         names of tensors stored as they are used
    input_scales  module name -> the one value of its stored input scale
    kv_scales     names of the KV cache's scales
    """

    modules: Mapping[str, StoredModule]
    plain: list[str]
    input_scales: Mapping[str, Tensor]
    kv_scales: list[str]


def sort_tensors(checkpoint: Checkpoint) -> Stored:
    """Read the configuration and headers; of the weights only shapes that are stored as tensors, and input scales.

    Raises:
        CheckpointError: a kind of quantization that is not read, or files and configuration that disagree.
        Refused: plain matrices in a dtype that the configuration's cannot hold.
    """
    lookup = formats_of(checkpoint.config)
    parts = dict(_by_module(checkpoint))
    found = {name: _module(checkpoint, name, lookup(name, "Linear"), suffixes) for name, suffixes in parts.items()}
    taken = {tensor for suffixes in parts.values() for tensor in suffixes.values()}
    kv_scales = [name for name in checkpoint.tensors if name.rpartition(".")[2] in KV_SCALES]
    plain = [name for name in checkpoint.tensors if name not in taken and name not in kv_scales]
    for module in modules(checkpoint):
        if module.name not in found and module.cls == "Linear" and lookup(module.name, "Linear"):
            raise CheckpointError(
                f"quantization_config quantizes {module.name}, but {module.tensor} is stored as it is"
            )
    _check_dtype(checkpoint, set(plain))
    scales = {
        name: checkpoint.read(suffixes[suffix])
        for name, suffixes in parts.items()
        for suffix in INPUT_SCALES
        if suffix in suffixes
    }
    return Stored(found, plain, scales, kv_scales)


def _suffixes() -> set[str]:
    formats = [make_format(name) for name in FORMATS]
    return {suffix for fmt in formats for suffix in fmt.layout((128, 128), torch.bfloat16)}


def _by_module(checkpoint: Checkpoint) -> Iterator[tuple[str, dict[str, str]]]:
    """(module, suffix -> tensor name) of every module that has more than a plain weight and bias."""
    marks = (*_suffixes() - {"weight"}, *INPUT_SCALES, *NOT_READ)
    parts: dict[str, dict[str, str]] = {}
    for name in checkpoint.tensors:
        suffix = next((mark for mark in marks if name.endswith(f".{mark}")), None)
        if suffix:
            parts.setdefault(name.removesuffix(f".{suffix}"), {})[suffix] = name
    for module, suffixes in parts.items():
        if f"{module}.weight" in checkpoint.tensors:
            suffixes["weight"] = f"{module}.weight"
        yield module, suffixes


def _module(checkpoint: Checkpoint, name: str, fmt: Format | None, suffixes: Mapping[str, str]) -> StoredModule:
    if fmt is None:
        raise CheckpointError(
            f"{name} has {', '.join(sorted(suffixes))}, but quantization_config leaves it in 16 bits: the two disagree"
        )
    shape = _shape(checkpoint, name, fmt, suffixes)
    problem = fmt.problem(shape)
    if problem:
        raise CheckpointError(f"{name} cannot be {fmt.name}: {problem}")
    layout = fmt.layout(shape, torch.bfloat16)
    _check_suffixes(name, fmt, set(suffixes) - set(INPUT_SCALES), set(layout))
    for suffix, spec in layout.items():
        if suffix not in SHAPES:
            _check_spec(checkpoint.tensors[suffixes[suffix]], suffixes[suffix], spec, any_shape=suffix in fmt.once)
    return StoredModule(name, fmt, shape, {suffix: suffixes[suffix] for suffix in layout})


def _shape(checkpoint: Checkpoint, name: str, fmt: Format, suffixes: Mapping[str, str]) -> tuple[int, int]:
    for suffix, read in SHAPES.items():
        if suffix in suffixes:
            rows, columns = read(checkpoint.read(suffixes[suffix]))
            return rows, columns
    stored = next((suffixes[suffix] for suffix in ("weight", "weight_packed") if suffix in suffixes), None)
    if stored is None or len(checkpoint.tensors[stored].shape) != 2:
        raise CheckpointError(f"{name} has {', '.join(sorted(suffixes))}, but no weight of {fmt.name} to go with it")
    info = checkpoint.tensors[stored]
    per_byte = 1 if stored.endswith(".weight") else 2  # packed without a shape: two 4-bit codes in a byte
    return info.shape[0], info.shape[1] * info.dtype.itemsize * per_byte


def _check_suffixes(name: str, fmt: Format, held: set[str], needed: set[str]) -> None:
    missing, extra = sorted(needed - held), sorted(held - needed)
    if missing:
        raise CheckpointError(f"{name} is {fmt.name}, but {', '.join(missing)} is missing: the checkpoint is not whole")
    if extra:
        raise CheckpointError(f"{name} is {fmt.name} and has {', '.join(extra)} as well, which is not read")


def _check_spec(info: TensorInfo, name: str, spec: Spec, *, any_shape: bool) -> None:
    """Scales may have another 16- or 32-bit float dtype, and a tensor without rows any shape of the same size."""
    same_dtype = info.dtype == spec.dtype or {info.dtype, spec.dtype} <= WIDTH.keys()
    same_shape = info.shape == spec.shape or (any_shape and math.prod(info.shape) == math.prod(spec.shape))
    if not (same_dtype and same_shape):
        raise CheckpointError(
            f"{name} is {_shown(info.dtype, info.shape)}, but its format stores {_shown(spec.dtype, spec.shape)}"
        )


def _shown(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _check_dtype(checkpoint: Checkpoint, plain: set[str]) -> None:
    """An engine casts to the configuration's dtype: refuse where that would lose digits that we evaluate with."""
    named = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype")
    declared = DTYPES.get(str(named).removeprefix("torch."))
    if declared is None:
        return
    lossy = [
        module.tensor
        for module in modules(checkpoint)
        if module.tensor in plain and module.cls in ("Linear", "Embedding") and _loses(module.weight.dtype, declared)
    ]
    if lossy:
        dtype = str(checkpoint.tensors[lossy[0]].dtype).removeprefix("torch.")
        raise Refused(
            f"config.json says {named}, but {len(lossy)} matrices are stored in {dtype}, first {lossy[0]}: an engine "
            "would round them, so correct dtype in config.json or cast the weights"
        )


def _loses(stored: torch.dtype, declared: torch.dtype) -> bool:
    return stored != declared and WIDTH.get(stored, 0) >= WIDTH[declared]
