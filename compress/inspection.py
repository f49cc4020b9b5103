"""`compress inspect`: what a checkpoint is made of, from headers alone: format, bits and bytes per layer group."""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from compress.amounts import format_bytes
from compress.checkpoint import Checkpoint
from compress.modules import class_of, pattern_of
from compress.progress import say
from compress.source import peek_source
from compress.tensor_file import TensorInfo
from quant.format import Format
from quant.kv.config import kv_scheme_of
from quant.scheme import formats_of

__all__ = ["Group", "inspect", "show"]

MATRIX = re.compile(r"(?P<module>.+?)\.(?P<suffix>weight(?:[._].+)?)$")
MAIN = ("weight", "weight_packed")  # the tensor that holds the codes


@dataclass(frozen=True)
class Group:
    """Modules that differ only in their layer or expert number.

    bits     stored bits per weight, scales included
    """

    pattern: str
    count: int
    format: str
    weights: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Stored bits per weight, scales included."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


def inspect(checkpoint: Checkpoint) -> list[Group]:
    """The layer groups of a checkpoint, in file order.

    Raises:
        CheckpointError: a quantization that is not read.
    """
    lookup = formats_of(checkpoint.config)
    members: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        found = MATRIX.match(name)
        module, suffix = (found["module"], found["suffix"]) if found else name.rpartition(".")[::2]
        members.setdefault(module, {})[suffix] = info
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for module, tensors in members.items():
        fmt = lookup(module, class_of(module, checkpoint))
        label, weights = _label(fmt, tensors), _weights(fmt, tensors)
        total = sum(info.nbytes for info in tensors.values())
        groups.setdefault((pattern_of(module), label), []).append((weights, total))
    return [
        Group(pattern, len(sizes), label, sum(weights for weights, _ in sizes), sum(size for _, size in sizes))
        for (pattern, label), sizes in groups.items()
    ]


def _label(fmt: Format | None, tensors: dict[str, TensorInfo]) -> str:
    if fmt is None:
        return str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    options = ", ".join(f"{key}={value}" for key, value in fmt.options.items())
    return f"{fmt.name} ({options})" if options else fmt.name


def _weights(fmt: Format | None, tensors: dict[str, TensorInfo]) -> int:
    """Number of weights: codes of a quantized module, elements of a plain one."""
    main = next((tensors[suffix] for suffix in MAIN if suffix in tensors), None)
    if main is None or fmt is None:
        return sum(info.nbytes // info.dtype.itemsize for info in tensors.values())
    bits = (fmt.weights or {}).get("num_bits") or (8 if main.dtype is torch.int8 else 4)  # bitsandbytes names no bits
    return main.nbytes * 8 // int(bits)


def show(model: str, *, as_json: bool) -> None:
    """Print the groups as a table, or as JSON."""
    checkpoint = peek_source(model, say=say)
    groups = inspect(checkpoint)
    if as_json:
        json.dump(_record(checkpoint, groups), sys.stdout, indent=2)
        print()
        return
    console = Console()
    console.print(_table(groups))
    weights, total = sum(group.weights for group in groups), sum(group.nbytes for group in groups)
    console.print(f"{weights / 1e6:,.1f} M weights, {format_bytes(total)}, {8 * total / weights:.2f} bits per weight")
    scheme = kv_scheme_of(checkpoint.config)
    console.print(f"KV cache: {f'{scheme.label}, {scheme.serving}' if scheme else '16 bits'}", markup=False)


def _record(checkpoint: Checkpoint, groups: Iterable[Group]) -> dict[str, Any]:
    scheme = kv_scheme_of(checkpoint.config)
    return {
        "model_type": checkpoint.config.get("model_type"),
        "nbytes": checkpoint.nbytes,
        "kv_cache": None if scheme is None else {"scheme": scheme.label, "serving": scheme.serving},
        "groups": [{**asdict(group), "bits": round(group.bits, 4)} for group in groups],
    }


def _table(groups: Iterable[Group]) -> Table:
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("modules", "", "format"):
        table.add_column(heading, no_wrap=heading != "modules", overflow="fold")
    for heading in ("weights", "bits", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in groups:
        count = f"×{group.count}" if group.count > 1 else ""
        cells = (f"{group.weights / 1e6:,.2f} M", f"{group.bits:.2f}", format_bytes(group.nbytes))
        table.add_row(group.pattern, count, group.format, *cells)
    return table
