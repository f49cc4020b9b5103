"""`compress compare DIR DIR …`: variants of one source side by side, as a table and as a page like the report.

Each directory is verified first; evidence that does not hold is shown as REFUSED. The page says how many variants were
compared, since choosing the best of many is a selection that no single bound accounts for.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compress.amounts import format_bytes, format_loss
from compress.errors import InputError
from compress.evidence_files import read_gate, read_json
from compress.manifest import EVIDENCE
from compress.page import intervals, render
from compress.pictures import Point, pareto
from compress.progress import say
from compress.report import STYLES
from compress.verify import verify

__all__ = ["Variant", "compare", "comparison_html", "show"]

DASH = "–"


@dataclass(frozen=True)
class Variant:
    """A run's output as it is compared. `worst` is the largest loss of a required metric, in units of its margin."""

    name: str
    verdict: str
    gate: Mapping[str, Any]
    run: Mapping[str, Any]
    worst: float | None

    def record(self) -> dict[str, Any]:
        """Plain data for --json."""
        losses = {metric["id"]: metric["loss"] for metric in self.gate["metrics"]}
        sizes = {key: self.run[key] for key in ("bytes_before", "bytes_after")}
        return {"directory": self.name, "verdict": self.verdict, "worst": self.worst, "losses": losses, **sizes}


def show(directories: Sequence[Path], page: Path, *, as_json: bool) -> int:
    """Compare, write the page, print the table; the exit code of the command."""
    variants = compare(directories)
    page.write_text(comparison_html(variants), encoding="utf-8")
    if as_json:
        print(json.dumps({"page": str(page), "variants": [variant.record() for variant in variants]}))
        return 0
    console = Console(highlight=False)
    console.print(_table(variants))
    console.print(str(page), markup=False, soft_wrap=True)
    return 0


def compare(directories: Sequence[Path]) -> list[Variant]:
    """The variants, smallest first.

    Raises:
        InputError: fewer than two, no output of a run, or outputs of different sources.
    """
    if len(directories) < 2:
        raise InputError(f"give at least two outputs of runs to compare (got {len(directories)})")
    variants = [_variant(directory) for directory in directories]
    sources = {variant.gate["binds"]["baseline_manifest"] for variant in variants}
    if len(sources) > 1:
        raise InputError("these are variants of different sources, whose losses do not compare")
    return sorted(variants, key=lambda variant: variant.run["bytes_after"])


def comparison_html(variants: Sequence[Variant]) -> str:
    """The page."""
    points = [
        Point(name, variant.run["bytes_after"], variant.worst, variant.verdict)
        for name, variant in zip(_dot_names(variants), variants, strict=True)
        if variant.worst is not None
    ]
    return render(
        "compare.html.j2",
        title=f"{len(variants)} variants of {variants[0].run['source']}",
        source=variants[0].run["source"],
        count=len(variants),
        passed=[variant.name for variant in variants if variant.verdict == "PASS"],
        same_plan=len({variant.gate["binds"]["plan"] for variant in variants}) == 1,
        picture=Markup(pareto(points)) if points else "",
        header=_header(variants),
        rows=[_row(variant, _metrics(variants)) for variant in variants],
        commands=[variant.run["command"] for variant in variants],
    )


def _dot_names(variants: Sequence[Variant]) -> list[str]:
    """Last parts of the names, without what the colour says too; the whole names where two would be alike."""
    short = [Path(variant.name).name.removesuffix(".blocked") for variant in variants]
    return short if len(set(short)) == len(short) else [variant.name for variant in variants]


def _variant(directory: Path) -> Variant:
    gate = read_gate(directory)
    report = verify(directory)
    if report.problems:
        say(f"{directory}: the evidence does not hold: {report.problems[0]}")
    names = {metric["id"] for metric in gate["metrics"] if metric["required"]}
    losses = [interval.loss for interval in intervals(gate) if interval.name in names]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return Variant(
        name=str(directory),
        verdict="REFUSED" if report.problems else report.verdict,
        gate=gate,
        run=read_json(directory / EVIDENCE / "run.json"),
        worst=max(known) if known and len(known) == len(losses) else None,
    )


def _metrics(variants: Sequence[Variant]) -> list[str]:
    return list(dict.fromkeys(metric["id"] for variant in variants for metric in variant.gate["metrics"]))


def _header(variants: Sequence[Variant]) -> list[str]:
    return ["variant", "weights", "smaller", *_metrics(variants), "worst, in margins", "verdict"]


def _row(variant: Variant, metrics: Sequence[str]) -> list[str]:
    losses = {metric["id"]: format_loss(metric["kind"], metric["loss"]) for metric in variant.gate["metrics"]}
    before, after = variant.run["bytes_before"], variant.run["bytes_after"]
    worst = DASH if variant.worst is None else f"{variant.worst:.2f}"
    shown = [losses.get(name, DASH) for name in metrics]
    return [variant.name, format_bytes(after), f"{before / after:.2f}×", *shown, worst, variant.verdict]


def _table(variants: Sequence[Variant]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    *names, worst, verdict = _header(variants)
    for name in (*names, worst.partition(",")[0], verdict):
        words = name in ("variant", "verdict")
        table.add_column(name, overflow="fold", justify="left" if words else "right", no_wrap=name != "variant")
    for variant in variants:
        name, size, *cells, verdict = _row(variant, _metrics(variants))
        short = [cell.partition(" ")[0] for cell in cells]
        table.add_row(Text(name), size, *map(Text, short), Text(verdict, style=STYLES[verdict]))
    table.caption, table.caption_justify = (
        "worst: the largest loss of a required metric, in units of its margin",
        "left",
    )
    return table
