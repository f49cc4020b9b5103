"""Users against context for every format, as PNG or SVG: the curve on which users x context fills the memory.

Needs matplotlib, which is not installed by default.
"""

from pathlib import Path
from typing import Any

from compress.errors import InputError
from compress.planner.formats import KV_FORMATS
from compress.planner.kv import Layout, layout
from compress.planner.plan import PlanReport, PlanRow

__all__ = ["curve", "draw"]

SUFFIXES = (".png", ".svg")
POINTS = 48
LINES = ("-", "--", ":", "-.")


def curve(report: PlanReport, row: PlanRow, room: float) -> list[tuple[int, int]]:
    """(context, users held) from 256 tokens to the model's longest context, where at least one user is held."""
    model, limit = report.setting.model, report.setting.limit
    cache = layout(model, KV_FORMATS[row.kv_format], row.tp, in_flight=limit.batched)
    longest = model.get("max_position_embeddings", default=2**17)
    return [] if cache is None else _points(cache, room, longest)


def _points(cache: Layout, room: float, longest: int) -> list[tuple[int, int]]:
    shortest = min(256, longest)
    contexts = (round(shortest * (longest / shortest) ** (i / (POINTS - 1))) for i in range(POINTS))
    return [(length, users) for length in contexts if (users := cache.users(room, length))]


def draw(report: PlanReport, path: Path | str) -> Path:
    """Write the picture; the format follows the suffix, .png or .svg.

    Raises:
        InputError: another suffix, or matplotlib is missing.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"a picture is written as .png or .svg, not {path.name!r}: change the suffix")
    try:
        from matplotlib.figure import Figure  # optional, and slow to import
    except ImportError as error:
        raise InputError("a picture needs matplotlib: pip install 'compress-gate[plot]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    _fill(figure.subplots(), report)
    figure.savefig(path, dpi=150)
    return path


def _fill(axes: Any, report: PlanReport) -> None:
    ask = report.setting.ask
    weights = list(dict.fromkeys(row.weight_format for row in report.rows))
    caches = list(dict.fromkeys(row.kv_format for row in report.rows))
    for row in report.rows:
        color, line = f"C{weights.index(row.weight_format)}", LINES[caches.index(row.kv_format) % len(LINES)]
        _fill_row(
            axes, [curve(report, row, room) for room in (row.room.low, row.room.best, row.room.high)], color, line
        )
    for i, name in enumerate(weights):
        axes.plot([], [], color=f"C{i}", label=f"{name} weights")
    for i, name in enumerate(caches):
        axes.plot([], [], color="gray", linestyle=LINES[i % len(LINES)], label=f"{name} KV cache")
    axes.plot(
        ask.context, ask.users, "k*", markersize=14, linestyle="none", label=f"{ask.users} users of {ask.context}"
    )
    axes.set(xlabel="context, tokens per user", ylabel="users held at the same time")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom=1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.0f}")
    axes.set_title(f"{report.setting.model.name} on {report.tp} x {report.setting.gpu.name}")
    axes.grid(True, alpha=0.2)
    axes.legend(fontsize="small")


def _fill_row(axes: Any, curves: list[list[tuple[int, int]]], color: str, line: str) -> None:
    low, best, high = (dict(points) for points in curves)
    if best:
        axes.plot(list(best), list(best.values()), color=color, linestyle=line)
        axes.fill_between(list(high), [low.get(n, 0.5) for n in high], list(high.values()), color=color, alpha=0.06)
