"""`compress bench`: what prefill and decode take, here or on a server, source against variant.

A claim about speed comes from here and never from a number of parameters or bits.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from compress.amounts import format_bytes
from compress.bench_options import Endpoint, Local, parse_bench
from evals.serving import DEFINITIONS, Ratio, Round, compare, summarize

__all__ = ["bench", "show"]

DASH = "–"
FIGURES = {"ttft": ("TTFT ms", 1000), "tpot": ("TPOT ms", 1000), "e2e": ("end to\nend s", 1)}
RATIOS = {"ttft": "TTFT", "tpot": "TPOT", "tokens_per_second": "tokens/s"}
NOTES = {
    "loader": "loader: dequantized weights, emulated rounding, as the gate measures; no measure of the format's speed",
    "transformers": "transformers: the library's own loading and kernels, not an engine's; for an engine use url=",
}


def show(words: Sequence[str], *, as_json: bool) -> int:
    """Measure and print; the exit code of the command."""
    found = bench(words)
    if as_json:
        json.dump(found, sys.stdout, indent=2)
        print()
        return 0
    console = Console(highlight=False)
    console.print(_table(found["sides"]))
    for line in _lines(found):
        console.print(line, markup=False, soft_wrap=True)
    return 0


def bench(words: Sequence[str]) -> dict[str, Any]:
    """Measure as the words ask; plain data, seconds and bytes.

    Raises:
        InputError: words that are wrong, or a side that cannot be measured.
    """
    options = parse_bench(words)
    return _local(options) if isinstance(options, Local) else _endpoint(options)


def _local(options: Local) -> dict[str, Any]:
    from compress.bench_local import measure_local  # brings the model code
    from compress.environment import environment

    found = measure_local(options)
    rounds, sides = found.rounds, found.sides
    return _result(options.model_dump(), rounds, sides) | {"environment": environment()}


def _endpoint(options: Endpoint) -> dict[str, Any]:
    from compress.bench_endpoint import measure_endpoint

    rounds = measure_endpoint(options)
    targets = {name: limit for name in ("ttft", "tpot") if (limit := getattr(options, name)) is not None}
    return _result(options.model_dump(), rounds, {name: {} for name in rounds}, targets)


def _result(
    setup: Mapping[str, Any],
    rounds: Mapping[str, Sequence[Round]],
    sides: Mapping[str, Mapping[str, Any]],
    targets: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Every side's figures, and those of each variant over the first side, where that is a baseline."""
    first, *others = rounds
    pairs = {name: compare(rounds[first], rounds[name]) for name in others if first.startswith("baseline")}
    return {
        "setup": dict(setup),
        "definitions": DEFINITIONS,
        "sides": {name: {**sides[name], **summarize(found, targets)} for name, found in rounds.items()},
        "baseline": first if pairs else None,
        "ratios": {name: {key: asdict(value) for key, value in found.items()} for name, found in pairs.items()},
    }


def _table(sides: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    local = any("path" in side for side in sides.values())
    table.add_column("side", no_wrap=True)
    for heading in (*(("memory",) if local else ()), "n", *(name for name, _ in FIGURES.values()), "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, side in sides.items():
        memory = (format_bytes(side["bytes_in_memory"]),) if local else ()
        requests = f"{side['requests']}" + (f"\n{side['failed']} failed" if side["failed"] else "")
        figures = [_spread(side[key], unit) for key, (_, unit) in FIGURES.items()]
        table.add_row(name, *memory, requests, *figures, f"{side['tokens_per_second']:.1f}")
    return table


def _spread(found: Mapping[str, float | None] | None, unit: float) -> str:
    """The median, and below it p90 and p99 where there are requests enough, else the range."""
    if found is None:
        return DASH
    middle, lowest, highest = (unit * float(found[key] or 0.0) for key in ("p50", "lowest", "highest"))
    high = [f"{name} {_short(unit * value)}" for name in ("p90", "p99") if (value := found[name]) is not None]
    return f"{_short(middle)}\n{' '.join(high) or f'{_short(lowest)}-{_short(highest)}'}"


def _short(value: float) -> str:
    """Three digits, or all of a larger whole number."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, ratios in found["ratios"].items():
        shown = ", ".join(f"{RATIOS[key]} ×{_ratio(Ratio(**ratio))}" for key, ratio in ratios.items())
        lines.append(f"{name} over {found['baseline']}: {shown} (geometric mean over rounds, 95% interval)")
    for name, side in found["sides"].items():
        if "goodput" in side:
            lines.append(f"{name}: {side['goodput']:.2f} requests/s met every target")
    lines.append(
        "n requests: their median, below it p90 and p99 or the range; TPOT = (last - first token) / (tokens - 1)"
    )
    return lines + [NOTES[path] for path in dict.fromkeys(s["path"] for s in found["sides"].values() if "path" in s)]


def _ratio(ratio: Ratio) -> str:
    bounds = "" if ratio.lower is None or ratio.upper is None else f" ({ratio.lower:.2f} to {ratio.upper:.2f})"
    return f"{ratio.estimate:.2f}{bounds}"
