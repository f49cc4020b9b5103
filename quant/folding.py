"""Equalization of a block: channel factors that hide in whatever produces a linear's input.

Rows of the table name modules inside a decoder block. A norm multiplies its output channel by channel, so it can take
1/s; so can a linear whose rows are only multiplied with other things before they are read (up before down, v before o).
Every reader of the producer must be in the row, which is why mixtures of experts, whose router reads the same norm as
the experts, have no row for it. Rows that a block does not have are skipped, and after folding the block is run once
more: a family for which the table is wrong is refused instead of spoilt.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import Refused
from compress.walk import Block, Group
from quant.format import Format
from quant.methods.equalize import equalizing_factor

__all__ = ["FOLDS", "Fold", "Folded", "equalize"]

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LATENT = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
MLP = ("mlp.gate_proj", "mlp.up_proj")
TOLERANCE = 1e-2  # of the block's largest output: far above rounding to bfloat16, far below a wrong fold


@dataclass(frozen=True)
class Fold:
    """`producer` may be divided by a factor per channel that all its `readers` are multiplied with.

    needs   a module the block must have for the row to hold
    unless  a module the block must not have
    """

    producer: str
    readers: tuple[str, ...]
    needs: str = ""
    unless: str = ""


FOLDS = (
    Fold("self_attn.v_proj", ("self_attn.o_proj",)),
    Fold("mlp.up_proj", ("mlp.down_proj",), needs="mlp.gate_proj"),
    Fold("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)),
    Fold("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
    Fold("input_layernorm", QKV),
    Fold("input_layernorm", LATENT),
    Fold("input_layernorm", ("self_attn.qkv_proj",)),
    Fold("post_attention_layernorm", MLP, unless="pre_feedforward_layernorm"),
    Fold("post_attention_layernorm", ("mlp.gate_up_proj",), unless="pre_feedforward_layernorm"),
    Fold("pre_feedforward_layernorm", MLP),
)


@dataclass(frozen=True)
class Folded:
    """A fold that was made.

    readers  the linears whose columns were multiplied
    factor   (I,) by what
    ratio    the rounding error relative to that without factors
    """

    readers: tuple[str, ...]
    factor: Tensor
    ratio: float


def equalize(
    block: Block, formats: Mapping[str, Format], dtype: torch.dtype, cost: Callable[[Group], Tensor]
) -> dict[str, Folded]:
    """Choose and fold the factors of every row whose readers are all quantized.

    Args:
        block: changed in place; its function stays the same up to rounding.
        formats: of the block's linears that are quantized, by the checkpoint's name.
        dtype: that changed norms are stored in.
        cost: what a squared error in each input column of a group costs, (I,).

    Returns:
        by producer, what was folded, where it lowers the rounding error.

    Raises:
        Refused: folding changed what the block computes.
    """
    with torch.no_grad():
        before = block.forward(block.inputs[:1])
    seen: dict[str, _Seen] = {}
    for group in block.observe([*formats], first=True):
        seen |= dict.fromkeys(group.names, _Seen(cost(group), group.statistics.sample))
    folds = {
        producer: _fold(block, producer, readers, formats[readers[0]], seen[readers[0]], dtype)
        for producer, readers in _rows(block, seen)
    }
    with torch.no_grad():
        after = block.forward(block.inputs[:1])
    _check(block.name, before, after)
    return {f"{block.name}.{producer}": fold for producer, fold in folds.items() if fold is not None}


@dataclass(frozen=True)
class _Seen:
    """Of a layer's inputs: what an error in each column costs (I,), and a sample of them (n, I)."""

    cost: Tensor
    sample: Tensor


def _rows(block: Block, seen: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    present = {name for name, _ in block.module.named_modules()}
    for fold in FOLDS:
        readers = [f"{block.name}.{reader}" for reader in fold.readers]
        needed = {fold.producer, fold.needs} - {""}
        if needed <= present and fold.unless not in present - {""} and all(name in seen for name in readers):
            yield fold.producer, readers


def _fold(
    block: Block, producer: str, readers: list[str], fmt: Format, seen: _Seen, dtype: torch.dtype
) -> Folded | None:
    source = block.module.get_submodule(producer)
    linears = [block.linears[name] for name in readers]
    weight = torch.cat([linear.weight.float() for linear in linears])
    copies, head = _heads(block, producer, weight.shape[1])
    tie = partial(_tie, copies=copies, head=head)
    factor, ratio = equalizing_factor(weight, fmt, seen.cost, inputs=seen.sample, dtype=dtype, tie=tie)
    if ratio >= 1:
        return None
    factor = _divide(source, factor, dtype, copies, head)
    for linear in linears:
        linear.weight.data.mul_(factor)
    return Folded(tuple(readers), factor, ratio)


def _heads(block: Block, producer: str, columns: int) -> tuple[int, int]:
    """How many heads in a row read each of the producer's heads, and a head's width: grouped-query attention."""
    source = block.module.get_submodule(producer)
    rows = source.out_features if isinstance(source, nn.Linear) else columns
    if rows == columns:
        return 1, columns
    attention: Any = block.module.get_submodule(producer.rpartition(".")[0])
    return columns // rows, int(attention.head_dim)


def _tie(values: Tensor, *, copies: int, head: int) -> Tensor:
    """Each channel's mean over its copies, in the readers' order."""
    grouped = values.reshape(-1, copies, head)
    return grouped.mean(dim=1, keepdim=True).expand_as(grouped).reshape(-1)


def _divide(source: Any, factor: Tensor, dtype: torch.dtype, copies: int, head: int) -> Tensor:
    """Divide the producer; the factor that was really applied, after rounding a norm to what is stored."""
    own = factor.reshape(-1, copies, head)[:, 0].reshape(-1)
    if isinstance(source, nn.Linear):
        source.weight.data.div_(own[:, None])
        if source.bias is not None:
            source.bias.data.div_(own)
        return factor
    offset = _offset(source)
    old = source.weight.data.float() + offset
    stored = (old / own - offset).to(dtype).float()
    source.weight.data.copy_(stored)
    if getattr(source, "bias", None) is not None:
        source.bias.data.div_(own)
    return torch.where(stored + offset != 0, old / (stored + offset), own)


def _offset(norm: Any) -> float:
    """1 for norms that multiply by 1 + weight (Gemma's), 0 for the others; asked of the module itself."""
    kept = norm.weight.data.clone()
    norm.weight.data.zero_()
    with torch.no_grad():
        multiplies = bool(norm(torch.ones_like(kept)).any()) and getattr(norm, "bias", None) is None
    norm.weight.data.copy_(kept)
    return 1.0 if multiplies else 0.0


def _check(name: str, before: Tensor, after: Tensor) -> None:
    change = (after - before).abs().max() / before.abs().max()
    if not bool(change < TOLERANCE):
        raise Refused(f"equalization changed the output of {name} by {float(change):.1%}: use another method for it")
