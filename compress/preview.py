"""The dry run: everything a run would do, from headers alone, as tables a person can check before hours are spent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from compress.amounts import format_bytes, format_change, format_loss
from compress.checkpoint import Checkpoint
from compress.evaluation import metrics_of
from compress.fit import fit_lines, fit_record
from compress.modules import pattern_of
from compress.recipe import Recipe
from compress.stages import LayerRow, StagePlan
from compress.writer import free_bytes
from evals.resolution import resolve
from evals.samples import SampleSet

__all__ = ["LayerGroup", "group_layers", "group_table", "preview_record", "show_preview"]

WORKING_SET = 3  # largest tensors held at a time, an upper bound
EVAL_OVERHEAD = 1.3  # activations and logits beside the weights


@dataclass(frozen=True)
class LayerGroup:
    """Modules that differ only in their layer or expert number."""

    pattern: str
    count: int
    shape: tuple[int, int]
    becomes: str
    reason: str
    bytes_before: int
    bytes_after: int


def group_layers(rows: Iterable[LayerRow]) -> list[LayerGroup]:
    """Collapse layer and expert numbers to `*`."""
    groups: dict[tuple[str, tuple[int, int], str, str], list[LayerRow]] = {}
    for row in rows:
        pattern = pattern_of(row.name)
        groups.setdefault((pattern, row.shape, row.becomes, row.reason), []).append(row)
    return [
        LayerGroup(
            pattern=pattern,
            count=len(members),
            shape=shape,
            becomes=becomes,
            reason=reason,
            bytes_before=sum(row.bytes_before for row in members),
            bytes_after=sum(row.bytes_after for row in members),
        )
        for (pattern, shape, becomes, reason), members in groups.items()
    ]


def group_table(title: str, groups: Sequence[LayerGroup]) -> Table:
    """What every layer group becomes."""
    table = _narrow(title)
    for heading in ("modules", "", "shape"):
        table.add_column(heading, no_wrap=True, overflow="fold")
    table.add_column("becomes")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in groups:
        becomes = Text(group.becomes) if not group.reason else Text(f"{group.becomes}: {group.reason}", style="dim")
        before, after = format_bytes(group.bytes_before), format_bytes(group.bytes_after)
        count = f"×{group.count}" if group.count > 1 else ""
        table.add_row(group.pattern, count, f"{group.shape[0]}×{group.shape[1]}", becomes, before, after)
    return table


def _narrow(title: str) -> Table:
    return Table(
        title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def preview_record(recipe: Recipe, source: Checkpoint, plans: Sequence[StagePlan]) -> dict[str, Any]:
    """The same as plain data: sizes in bytes, losses in the gate's units."""
    resolutions = {
        metric.id: resolve(metric, metric.plan(0)[-1], alpha=recipe.gate.alpha) for metric in metrics_of(recipe)
    }
    return {
        "recipe": recipe.model_dump(mode="json", exclude_none=True),
        "stages": [
            {
                "name": plan.name,
                "summary": plan.summary,
                "candidates": [*plan.candidates],
                "layers": [asdict(group) for group in group_layers(plan.layers)],
            }
            for plan in plans
        ],
        **_figures(recipe, source, plans),
        **fit_record(recipe.fit, source, plans[-1].result),
        "resolution": {
            name: {"fewest": fewest, "assumed": [asdict(row) for row in rows]}
            for name, (fewest, rows) in resolutions.items()
        },
    }


def show_preview(recipe: Recipe, source: Checkpoint, plans: Sequence[StagePlan], sets: Sequence[SampleSet]) -> None:
    """Print the recipe, each stage's layers, sizes, memory, disk, and what the gate can resolve."""
    console = Console(highlight=False)
    console.print(Text("resolved recipe", style="bold"))
    console.print(
        yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True), sort_keys=False, width=1000).rstrip(),
        markup=False,
        soft_wrap=True,
    )
    for plan in plans:
        if plan.candidates:
            console.print(_candidates(plan.candidates))
        console.print(group_table(plan.summary, group_layers(plan.layers)))
    console.print(_sizes(recipe, source, plans))
    console.print(_resolution(recipe, sets))


def _candidates(rows: Sequence[Mapping[str, str]]) -> Table:
    """What could be made, the source first, then what will be made or tried, then the nearest others."""
    table = _narrow("candidates")
    for heading in rows[0]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values(), style="bold" if row.get("") in ("chosen", "tried") else "")
    return table


def _figures(recipe: Recipe, source: Checkpoint, plans: Sequence[StagePlan]) -> dict[str, int]:
    """Bytes, and files; memory is an upper bound for the stages and an estimate for the evaluation."""
    elements = sum(info.nbytes // info.dtype.itemsize for info in source.tensors.values())
    width = {"float32": 4}.get(recipe.evals.engine.dtype, 2)
    return {
        "bytes_before": source.nbytes,
        "bytes_after": plans[-1].shards.nbytes,
        "files": len(plans[-1].shards.files),
        "disk_needed": sum(plan.shards.nbytes for plan in plans),
        "disk_free": free_bytes(Path(recipe.output)),
        "memory_stages": max(
            WORKING_SET * max(info.nbytes for info in source.tensors.values()), *(plan.memory for plan in plans)
        ),
        "memory_evaluation": round(elements * width * EVAL_OVERHEAD),
    }


def _sizes(recipe: Recipe, source: Checkpoint, plans: Sequence[StagePlan]) -> Group:
    found = _figures(recipe, source, plans)
    before, after = found["bytes_before"], found["bytes_after"]
    lines = [
        f"weights   {format_bytes(before)} → {format_change(before, after)}, "
        f"{found['files']} file(s) of at most {format_bytes(recipe.max_shard_size)}",
        f"disk      {format_bytes(found['disk_needed'])} while running, {format_bytes(found['disk_free'])} free",
        f"memory    stages {format_bytes(found['memory_stages'])}; evaluation about "
        f"{format_bytes(found['memory_evaluation'])} in {recipe.evals.engine.dtype}",
    ]
    for where, _, variant in fit_lines(fit_record(recipe.fit, source, plans[-1].result)):
        lines.append(f"fit       {where}: {variant}")
    return Group(*(Text(line) for line in lines))


def _resolution(recipe: Recipe, sets: Sequence[SampleSet]) -> Table:
    """Per metric, what so many samples can tell apart."""
    table = _narrow("what the gate can resolve")
    for heading in ("metric", "samples", "fewest", "margin", "assumed damage", "detectable", "inconclusive"):
        table.add_column(heading, overflow="fold")
    for metric in metrics_of(recipe):
        n = metric.plan(0)[-1]
        fewest, rows = resolve(metric, n, alpha=recipe.gate.alpha)
        fixed = (metric.id, str(n), str(fewest), format_loss(metric.kind, metric.limit))
        if not rows:
            table.add_row(*fixed, "–", "–", "–")
        for row in rows:
            table.add_row(*fixed, row.assumption, format_loss(metric.kind, row.detectable), f"{row.inconclusive:.0%}")
    table.caption = "a lossless variant of the assumed spread passes the detectable margin 8 times in 10"
    table.caption_justify = "left"
    return table
