"""A plan as a table for people and as JSON for programs."""

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from compress.planner.band import Band
from compress.planner.engine import GIB
from compress.planner.plan import Choice, PlanReport, PlanRow

__all__ = ["as_json", "print_plan", "table"]


def print_plan(report: PlanReport, console: Console) -> None:
    """Table, choice and assumptions."""
    console.print(table(report))
    console.print(_sentence(report))
    for line in report.assumptions:
        console.print(f"- {line}", style="dim", highlight=False)


def table(report: PlanReport) -> Table:
    """One row per weight format and KV format: the best guess, and the interval below it."""
    ask, gpu = report.setting.ask, report.setting.gpu
    title = f"{report.setting.model.name} on {report.tp} x {gpu.name}"
    found = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=0)
    found.add_column("weights")
    found.add_column("KV")
    for name in (
        "weights\nGB",
        "KV KiB\n/token",
        "room\nGiB",
        f"users\nof {ask.context}",
        f"context\nfor {ask.users}",
        "TTFT\nms",
        "TPOT\nms",
        "tokens\n/s",
        "in\ntarget",
    ):
        found.add_column(name, justify="right", overflow="fold")
    for row in report.rows:
        found.add_row(*_cells(row), style=None if row.users.best >= ask.users else "dim")
    return found


def _cells(row: PlanRow) -> tuple[str, ...]:
    speed = row.speed
    times = (_band(speed.ttft, 1e-3), _band(speed.tpot, 1e-3), f"{speed.tokens_per_second.best:.0f}") if speed else None
    return (
        row.weight_format,
        row.kv_format,
        f"{row.weights / 1e9:.2f}",
        f"{row.kv_token / 1024:.2f}",
        _band(row.room, GIB, digits=1),
        _band(row.users),
        _band(row.context),
        *(times or ("-", "-", "-")),
        str(row.served),
    )


def _band(band: Band, unit: float = 1.0, digits: int = 0) -> str:
    low, best, high = (f"{value / unit:.{digits}f}" for value in (band.low, band.best, band.high))
    if low == high or band.high < 0:
        return best
    return f"{best}\n{low}-{high}" if band.low >= 0 else f"{best}\n{low} to {high}"


def _sentence(report: PlanReport) -> str:
    ask, choice = report.setting.ask, report.choice
    goals = [f"{ask.users} users of {ask.context} tokens"]
    goals += [f"{name} {1000 * value:g} ms" for name, value in (("TTFT", ask.ttft), ("TPOT", ask.tpot)) if value]
    if choice is None:
        return f"Nothing meets {', '.join(goals)} on {report.setting.gpu.name}."
    return f"Cheapest for {', '.join(goals)}: {describe(choice, report.setting.gpu.name)}."


def describe(choice: Choice, gpu: str) -> str:
    """A choice in words."""
    row = choice.row
    sure = "" if choice.certain else ", if the engine takes no more than the best guess"
    return (
        f"{row.weight_format} weights with {row.kv_format} KV cache, {choice.gpus} x {gpu} "
        f"({choice.copies} x tp={row.tp}, {row.served} users in target each){sure}"
    )


def as_json(report: PlanReport) -> dict[str, Any]:
    """Plain numbers in bytes, tokens and seconds; intervals as {low, best, high}."""
    given = report.setting
    return {
        "model": {
            "name": given.model.name,
            "parameters": given.model.parameters,
            "from_headers": given.model.measured,
            "quantized": given.model.quantized or None,
        },
        "ask": asdict(given.ask),
        "gpu": asdict(given.gpu),
        "engine": {**asdict(given.engine), **asdict(given.limit)},
        "tp": report.tp,
        "rows": [asdict(row) for row in report.rows],
        "choice": None if report.choice is None else asdict(report.choice),
        "assumptions": list(report.assumptions),
    }
