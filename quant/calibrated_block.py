"""One block of a calibrated run: solve every group, or put back what an earlier run has solved."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.architectures import fused_groups
from compress.errors import Refused
from compress.walk import Block, Group
from quant.activations import input_scale_name
from quant.folding import Folded, equalize
from quant.format import Format, dequantize, stored
from quant.learned_block import Learning, learn_block
from quant.methods import ITERATIONS, Method
from quant.methods.blocks import row_range
from quant.methods.solve import Inputs, Solution, aim, importance, prepare, solve
from quant.plan import Assignment
from quant.static_inputs import input_rounding, input_scales

__all__ = ["Stored", "quantize_block", "restore_block", "solve_alone"]

Stored = dict[str, Tensor]  # by tensor name


def quantize_block(
    block: Block, assignments: Mapping[str, Assignment], method: Method, *, iterations: int = ITERATIONS
) -> tuple[Stored, dict[str, Any]]:
    """Solve the linears of a block, which computes with the result from here on.

    Args:
        iterations: of learned rounding, where the method has it.

    Returns:
        tensors to store, by name; what was done, as plain data.

    Raises:
        Refused: a weight or statistics that are not finite, or a linear that no calibration token reached.
    """
    formats = {name: assignment.fmt for name, assignment in assignments.items() if assignment.fmt}
    folded: dict[str, Folded] = {}
    tensors: Stored = {}
    if method.equalize and formats:
        dtype = next(iter(assignments.values())).module.weight.dtype
        folded = equalize(block, formats, dtype, partial(_cost, method))
        tensors |= _changed(block, folded, formats, dtype)
    scales = input_scales(block, formats, next(iter(assignments.values())).module.weight.dtype) if formats else {}
    solutions: dict[str, Solution] = {}
    roundings: dict[str, Any] = {}
    before = block.inputs.clone() if method.learn else None
    factors = {reader: fold.factor for fold in folded.values() for reader in fold.readers}
    for group in block.groups([*formats], factors):
        solutions |= _quantize_group(group, assignments, method)
        group.rounding = input_rounding(group.names[0], formats[group.names[0]], scales)
        roundings |= dict.fromkeys(group.names, group.rounding)
    for name in formats.keys() - solutions.keys():
        raise Refused(f"no calibration token reached {name}: add it to ignore or use method rtn")
    ratios = {producer: fold.ratio for producer, fold in folded.items()}
    report = {"block": block.name, "factors": ratios, "expert_tokens": block.expert_tokens()}
    if before is not None and formats:
        block.rewind(before)
        solutions, report["learned"] = learn_block(block, solutions, Learning(iterations, formats, roundings))
        for name, rounding in roundings.items():
            if rounding:
                block.round_inputs([name], rounding)
    for name, solution in solutions.items():
        tensors |= _stored(solution, assignments[name])
    layers = {name: solution.report.to_json() for name, solution in solutions.items()}
    return tensors | scales, report | {"layers": layers}


def _cost(method: Method, group: Group) -> Tensor:
    return importance(group.statistics.hessian, group.statistics.tokens, method)


def _changed(block: Block, producers: Collection[str], formats: Mapping[str, Format], dtype: torch.dtype) -> Stored:
    """The parameters of folded producers that no format stores, rounded to `dtype` here and in the block."""
    found: Stored = {}
    for name, tensor in block.tensors.items():
        owner, _, leaf = name.rpartition(".")
        if owner in producers and (owner not in formats or leaf == "bias"):
            found[name] = tensor.detach().to(dtype)
            tensor.data.copy_(found[name])
    return found


def _quantize_group(group: Group, assignments: Mapping[str, Assignment], method: Method) -> dict[str, Solution]:
    """Solve the linears of a group, those that engines fuse together: they share a scale that spans them."""
    seen = group.statistics
    try:
        inputs = prepare(seen.hessian, seen.tokens, method, seen.drift)
        weights = {name: aim(weight, inputs) for name, weight in zip(group.names, group.weights, strict=True)}
        solved = {
            part: _solve(part, weights, assignments[part[0]], method, inputs) for part in _parts(group, assignments)
        }
    except ValueError as error:
        raise Refused(f"{', '.join(group.names)} cannot be quantized: {error}") from error
    found: dict[str, Solution] = {}
    for part, solution in solved.items():
        found |= _unstack(part, solution, assignments)
    group.replace([found[name].rounded for name in group.names])
    return found


def _parts(group: Group, assignments: Mapping[str, Assignment]) -> list[tuple[str, ...]]:
    """Fused layers together where they share a scale or no block of it spans several rows, single layers otherwise."""
    parts: list[tuple[str, ...]] = []
    for fused in fused_groups([*group.names]):
        fmt = assignments[fused[0]].fmt
        parts += [fused] if fmt and (fmt.absmax_scope or fmt.block[0] == 1) else [(name,) for name in fused]
    return parts


def _solve(
    part: Sequence[str], weights: Mapping[str, Tensor], assignment: Assignment, method: Method, inputs: Inputs
) -> Solution:
    fmt = assignment.fmt
    assert fmt is not None  # only quantized modules are walked
    stacked = torch.cat([weights[name] for name in part])
    absmax = stacked.abs().amax() if fmt.absmax_scope else None
    return solve(stacked, fmt, method, inputs, absmax=absmax, dtype=assignment.module.weight.dtype)


def _unstack(part: Sequence[str], solution: Solution, assignments: Mapping[str, Assignment]) -> dict[str, Solution]:
    """Each layer's rows of a solution that was found for all of a part."""
    found: dict[str, Solution] = {}
    start = 0
    for name in part:
        module, fmt = assignments[name].module, assignments[name].fmt
        assert fmt is not None
        rows = slice(start, start + module.shape[0])
        scales = row_range(solution.scales, fmt.block, rows.start, rows.stop) if len(part) > 1 else solution.scales
        kept = solution.open.rows(rows) if solution.open else None
        found[name] = Solution(solution.codes[rows], scales, solution.rounded[rows], solution.report, kept)
        start = rows.stop
    return found


def _stored(solution: Solution, assignment: Assignment) -> Stored:
    module, fmt = assignment.module, assignment.fmt
    assert fmt is not None
    tensors = stored(solution.codes, solution.scales, fmt, module.shape, module.weight.dtype)
    return {f"{module.name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def restore_block(block: Block, assignments: Mapping[str, Assignment], tensors: Stored) -> None:
    """Put a finished block's weights in place."""
    for name, assignment in assignments.items():
        fmt = assignment.fmt
        assert fmt is not None
        mine = {t.removeprefix(f"{name}."): value for t, value in tensors.items() if t.rpartition(".")[0] == name}
        block.linears[name].weight.data.copy_(dequantize(mine, fmt, assignment.module.shape))
        rounding = input_rounding(name, fmt, tensors)
        if rounding:
            block.round_inputs([name], rounding)
    for name, value in tensors.items():
        if name in block.tensors and name.removesuffix(".weight") not in assignments:
            block.tensors[name].data.copy_(value)


def solve_alone(assignment: Assignment, weight: Tensor, method: Method) -> tuple[Stored, dict[str, Any]]:
    """A linear whose inputs were not seen: scales for inputs that are all alike, and nothing that needs more.

    Raises:
        Refused: a weight that is not finite, or a format that needs the range of its inputs.
    """
    name, fmt = assignment.module.name, assignment.fmt
    if fmt and input_scale_name(fmt.activations):
        raise Refused(f"{name} is not reached by calibration, which static input scales need: add it to ignore")
    inputs = Inputs(torch.eye(weight.shape[1], device=weight.device), 0)
    alone = replace(method, compensate=False)
    try:
        solution = _solve([name], {name: weight.float()}, assignment, alone, inputs)
    except ValueError as error:
        raise Refused(f"{name} cannot be quantized: {error}") from error
    return _stored(solution, assignment), {"layers": {name: solution.report.to_json()}}
