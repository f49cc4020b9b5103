"""What the quantize stage will do, from a checkpoint's headers alone: which module takes which format, every byte.

The dry run prints this plan, the disk space is checked against it, and the methods fill it in.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compress.architectures import fused_groups, layer_of
from compress.checkpoint import Checkpoint, quantization_block
from compress.errors import CheckpointError, RecipeError
from compress.modules import Module, modules, pattern_of
from compress.select import matches, select
from compress.tensor_file import Spec, TensorInfo
from compress.writer import ShardPlan, plan_shards
from quant.activations import input_scale, input_scale_name
from quant.format import Format
from quant.scheme import quantization_config

__all__ = ["Assignment", "Choice", "QuantizePlan", "cast_config", "cast_spec", "plan_quantize", "stored_specs"]

FLOATS = (torch.float64, torch.float32, torch.float16)


@dataclass(frozen=True)
class Choice:
    """A format for the modules that `targets` names; `fmt` None leaves them in 16 bits."""

    targets: tuple[str, ...]
    fmt: Format | None


@dataclass(frozen=True)
class Assignment:
    """What one module becomes: a format, or None and why."""

    module: Module
    fmt: Format | None
    reason: str


@dataclass(frozen=True)
class QuantizePlan:
    """Everything the stage will do, from headers alone.

    assignments  every module of the source
    outputs      every tensor to write, in order
    copies       tensors carried over, and whether they are cast to bfloat16
    shards       which file each output goes to
    config       the new config.json
    """

    checkpoint: Checkpoint
    assignments: list[Assignment]
    outputs: dict[str, Spec]
    copies: dict[str, TensorInfo]
    shards: ShardPlan
    config: dict[str, Any]

    @property
    def quantized(self) -> list[Assignment]:
        """The modules that take a format."""
        return [assignment for assignment in self.assignments if assignment.fmt]


def plan_quantize(
    checkpoint: Checkpoint,
    fmt: Format,
    *,
    targets: Sequence[str],
    ignore: Sequence[str],
    overrides: Sequence[Choice] = (),
    max_shard_size: int,
) -> QuantizePlan:
    """Decide every byte of the output.

    Raises:
        CheckpointError: the source is already quantized.
        RecipeError: a selection that matches nothing, a shape a format cannot take, fused layers that would differ.
    """
    block = quantization_block(checkpoint.config)
    if block is not None:
        method = block.get("quant_method", "unknown")
        raise CheckpointError(
            f"{checkpoint.path} is already quantized ({method}): give the 16-bit checkpoint it came from, or make it "
            "16-bit first with a stage quantize: {format: bf16}"
        )
    found = modules(checkpoint)
    cast = fmt.quant_method is None
    if cast:
        targets, ignore = [], []
    assignments = _assign(found, fmt, targets, ignore, overrides)
    _check_shapes(assignments)
    _check_fused(assignments)
    _check_static(assignments)
    _check_tied(assignments)
    outputs, copies = _outputs(checkpoint, assignments, cast=cast)
    config = _config(checkpoint, assignments, cast=cast)
    return QuantizePlan(checkpoint, assignments, outputs, copies, plan_shards(outputs, max_shard_size), config)


def _assign(
    found: Sequence[Module], fmt: Format, targets: Sequence[str], ignore: Sequence[str], overrides: Sequence[Choice]
) -> list[Assignment]:
    if not targets:
        return [Assignment(module, None, "stays in 16 bits") for module in found]
    chosen = {module.name for module in select(found, targets, ignore)}
    for choice in overrides:
        select(found, choice.targets, ())
    return [_assignment(module, fmt, module.name in chosen, ignore, overrides) for module in found]


def _assignment(
    module: Module, fmt: Format, chosen: bool, ignore: Sequence[str], overrides: Sequence[Choice]
) -> Assignment:
    if not chosen:
        ignored = matches(ignore, module)
        return Assignment(module, None, "in ignore" if ignored else f"{module.cls} is not in targets")
    strength = [matches(choice.targets, module) for choice in overrides]
    if not any(strength):
        return Assignment(module, fmt, "")
    choice = overrides[strength.index(max(strength))]
    return Assignment(module, choice.fmt, "" if choice.fmt else "an override keeps it in 16 bits")


def _identity(fmt: Format | None) -> tuple[object, ...]:
    return (fmt.name, *fmt.options.items()) if fmt else ()


def _check_shapes(assignments: Sequence[Assignment]) -> None:
    problems: dict[str, list[str]] = {}
    for assignment in assignments:
        problem = assignment.fmt and assignment.fmt.problem(assignment.module.shape)
        if problem:
            problems.setdefault(problem, []).append(assignment.module.name)
    if problems:
        listed = "".join(f"\n  - {problem}: {_patterns(names)}" for problem, names in problems.items())
        raise RecipeError(f"these layers cannot take the format; change its options or add them to ignore:{listed}")


def _patterns(names: Sequence[str]) -> str:
    """Names with `*` for their numbers, and how many there are of each."""
    counts = Counter(pattern_of(name) for name in names)
    return ", ".join(f"{pattern} ({count})" if count > 1 else pattern for pattern, count in counts.items())


def _check_fused(assignments: Sequence[Assignment]) -> None:
    by_name = {assignment.module.name: assignment for assignment in assignments}
    for group in fused_groups([*by_name]):
        if len({_identity(by_name[name].fmt) for name in group}) > 1:
            raise RecipeError(f"engines fuse {', '.join(group)}: give them the same format, or ignore all of them")


def _check_static(assignments: Sequence[Assignment]) -> None:
    for assignment in assignments:
        name, fmt = assignment.module.name, assignment.fmt
        if fmt is None or input_scale_name(fmt.activations) is None:
            continue
        if layer_of(name) is None:
            raise RecipeError(
                f"{name} lies outside the decoder blocks, so calibration sees no input of it: add it to ignore, or "
                "give it a format without static inputs"
            )
        if ".experts." in name and fmt.options.get("strategy") == "channel":
            raise RecipeError(
                f"{name} has static inputs and one scale per channel, which vLLM refuses for experts: set strategy "
                "to tensor, or inputs to dynamic"
            )


def _check_tied(assignments: Sequence[Assignment]) -> None:
    embeddings = {a.module.tensor: a.module.name for a in assignments if a.module.cls == "Embedding"}
    for assignment in assignments:
        module = assignment.module
        if not assignment.fmt or module.tensor not in embeddings:
            continue
        if module.cls == "Embedding":
            raise RecipeError(f"{module.name}: no engine loads a quantized embedding, take it out of targets")
        raise RecipeError(f"{module.name} is tied to {embeddings[module.tensor]}: add it to ignore")


def _outputs(
    checkpoint: Checkpoint, assignments: Sequence[Assignment], *, cast: bool
) -> tuple[dict[str, Spec], dict[str, TensorInfo]]:
    """Every tensor to write in source order, and which of them are carried over."""
    by_tensor: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        by_tensor.setdefault(assignment.module.tensor, []).append(assignment)
    outputs: dict[str, Spec] = {}
    copies: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        parts = by_tensor.get(name, [])
        if not any(part.fmt for part in parts):
            copies[name] = info
            outputs[name] = cast_spec(info.spec) if cast else info.spec
            continue
        for part in parts:
            if part.fmt:
                outputs |= stored_specs(part.module, part.fmt)
            elif part.module.tensor != f"{part.module.name}.weight":  # an expert of a fused tensor that is split
                copies[f"{part.module.name}.weight"] = part.module.weight
                outputs[f"{part.module.name}.weight"] = part.module.weight.spec
    return outputs, copies


def stored_specs(module: Module, fmt: Format | None) -> dict[str, Spec]:
    """The tensors that hold a module's matrix, by name."""
    if fmt is None:
        return {f"{module.name}.weight": module.weight.spec}
    layout = fmt.layout(module.shape, module.weight.dtype) | _input_scale(fmt, module.weight.dtype)
    return {f"{module.name}.{suffix}": spec for suffix, spec in layout.items()}


def _input_scale(fmt: Format, dtype: torch.dtype) -> dict[str, Spec]:
    suffix = input_scale_name(fmt.activations)
    scale = input_scale(fmt.activations or {}, torch.ones(()), dtype)
    return {} if suffix is None or scale is None else {suffix: Spec(scale.dtype, (1,))}


def cast_spec(spec: Spec) -> Spec:
    """What a carried tensor is in a bfloat16 checkpoint: float matrices are cast, everything else stays."""
    return Spec(torch.bfloat16, spec.shape) if spec.dtype in FLOATS else spec


def _config(checkpoint: Checkpoint, assignments: Sequence[Assignment], *, cast: bool) -> dict[str, Any]:
    if cast:
        return cast_config(checkpoint.config)
    groups: dict[tuple[object, ...], tuple[Format, list[str]]] = {}
    for assignment in assignments:
        if assignment.fmt:
            groups.setdefault(_identity(assignment.fmt), (assignment.fmt, []))[1].append(assignment.module.name)
    ignore = [a.module.name for a in assignments if not a.fmt and a.module.cls != "Embedding"]
    try:
        block = quantization_config([*groups.values()], ignore)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return checkpoint.config | {"quantization_config": block}


def cast_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a bfloat16 checkpoint: every spelling of the dtype, nested configurations too."""
    out = {key: cast_config(value) if isinstance(value, dict) else value for key, value in config.items()}
    return out | {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config}
