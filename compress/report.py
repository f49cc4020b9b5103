"""A run for people: the verdict in words, the table of metrics in the terminal, and report.md.

Both are made from plain data, gate.json and run.json, so that a stored run can be shown again. run.json holds

    command, source, output      what was typed, and what it named
    stages                       one each: name, summary, seconds, and layers: groups of modules that became the same
                                 (pattern, count, shape, becomes, reason "" if quantized, bytes_before, bytes_after)
    bytes_before, bytes_after    weights of the source and of the variant
    seconds, peak_bytes          of the whole run; peak_bytes may be null
    stages[].report, waterfall   as `compress.stage_report` describes them
    tasks                        where there are any: task -> as `evals.tasks.TaskScores.what`
    kv_cache, recall             where there are any, as `compress.kv_report` describes them
    fit                          where the recipe asks: its options, and of source and variant the planner's answer
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from compress.amounts import format_bounds, format_bytes, format_change, format_loss, format_score
from compress.fit import SIDES, fit_lines
from compress.kv_report import Section, sections, token_bytes
from compress.stage_report import stage_sections

__all__ = [
    "COLUMNS",
    "HEADLINES",
    "STYLES",
    "claim",
    "headline",
    "markdown_text",
    "metric_cells",
    "place",
    "report_markdown",
    "result_table",
]

HEADLINES = {
    "PASS": "every required metric shows a loss below its margin",
    "FAIL": "a loss above the margin is shown, so the variant is blocked",
    "INCONCLUSIVE": "the samples do not show that the loss is below the margin, so the variant is blocked",
    "REFUSED": "there is no valid evidence to decide on, so the variant is blocked",
    "WAIVED": "a loss was not shown to be below its margin, and somebody has answered for it",
}
STYLES = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "INCONCLUSIVE": "bold yellow",
    "REFUSED": "bold magenta",
    "WAIVED": "bold yellow",
}
COLUMNS = ("metric", "n", "baseline", "variant", "loss", "bounds", "margin", "verdict")
UNITS = {
    "log_perplexity": "perplexity",
    "gold_nll": "nats per token",
    "bits_per_byte": "bits per byte",
    "kl": "nats per token from the source",
    "accuracy": "accuracy in points",
}
RECALLED = ", the scores are those of an earlier run of the same bytes by the same plan"
OPTIONAL = "*"  # marks a metric that is not required


def headline(gate: Mapping[str, Any]) -> str:
    """The verdict in words, with what led to it where it blocks."""
    line = f"{gate['verdict']}: {HEADLINES[gate['verdict']]}"
    return line if gate["verdict"] == "PASS" else f"{line} ({gate['reason']})"


def claim(gate: Mapping[str, Any]) -> str:
    """What a PASS does and does not say."""
    return (
        f"With {1 - gate['alpha']:.0%} confidence for each metric, on samples like those measured, the loss is smaller "
        "than the margin. This says nothing about safety, other languages, longer contexts, or an engine that computes "
        "these weights differently from the format as stored."
    )


def result_table(gate: Mapping[str, Any]) -> Table:
    """The metrics of gate.json for a terminal of 80 columns; what each is measured in stands below."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        words = name in ("metric", "verdict")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=name == "verdict")
    for metric in gate["metrics"]:
        name, *cells, verdict = metric_cells(metric)
        short = [cell.replace(" to ", "..").partition(" ")[0] for cell in cells]
        table.add_row(Text(name), *map(Text, short), Text(verdict, style=STYLES[verdict]))
    table.caption, table.caption_justify = Text("\n".join(_captions(gate["metrics"]))), "left"
    return table


def _captions(metrics: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    yield " · ".join(f"{metric['id']}: {UNITS[metric['kind']]}" for metric in metrics)
    if any(not metric["required"] for metric in metrics):
        yield f"{OPTIONAL} not required: can warn, cannot block"


def report_markdown(gate: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """report.md: verdict, metrics, sizes, layers, and how to get the same again."""
    parts = [
        f"# {gate['verdict']}",
        markdown_text(headline(gate)) + ".",
        *([claim(gate)] if gate["verdict"] == "PASS" else []),
        *_section("Waivers", [_waiver(waiver) for waiver in gate.get("waivers", ())]),
        *_section("Warnings", [f"- {markdown_text(warning)}" for warning in gate["warnings"]]),
        "## Metrics",
        _table(COLUMNS, [metric_cells(metric) for metric in gate["metrics"]]),
        _list(f"- {markdown_text(metric['id'])}: {markdown_text(metric['reason'])}" for metric in gate["metrics"]),
        _details(gate),
        *[part for section in [*stage_sections(run), *sections(run)] for part in _long_range(section)],
        "## Size and cost",
        _sizes(run),
        *[part for stage in run["stages"] for part in _stage(stage)],
        "## Reproduce",
        _commands(gate, run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def metric_cells(metric: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table of metrics."""
    kind = metric["kind"]
    return (
        metric["id"] + ("" if metric["required"] else OPTIONAL),
        str(metric["n"]),
        format_score(kind, metric["baseline"]),
        format_score(kind, metric["variant"]),
        format_loss(kind, metric["loss"]),
        format_bounds(kind, metric["lower"], metric["upper"]),
        format_loss(kind, metric["margin"]),
        metric["verdict"],
    )


def _details(gate: Mapping[str, Any]) -> str:
    """How to read the table."""
    optional = f" A metric with {OPTIONAL} is not required." if any(not m["required"] for m in gate["metrics"]) else ""
    return (
        "n counts documents, problems or questions. The loss is paired, sample by sample, and worse is positive; each "
        f"bound is one-sided at level {gate['alpha']:g}.{optional} Every number and every row is beside this file."
    )


def _long_range(section: Section) -> tuple[str, str, str]:
    return f"## {section.title}", markdown_text(section.text), _table(section.header, section.rows)


def _sizes(run: Mapping[str, Any]) -> str:
    before, after = run["bytes_before"], run["bytes_after"]
    peak, kv = run.get("peak_bytes"), token_bytes(run)
    rows = [
        ("weights of the source", format_bytes(before)),
        ("weights of the variant", format_change(before, after)),
        *([("KV cache of a token", f"{format_bytes(kv[0])} → {format_change(*kv)}")] if kv else []),
        ("time", f"{run['seconds']:.0f} s{RECALLED if run.get('recalled') else ''}"),
        *([("peak memory", format_bytes(peak))] if peak is not None else []),
        *(
            (f"{side}, {where}", text)
            for where, *texts in fit_lines(run)
            for side, text in zip(SIDES, texts, strict=True)
        ),
    ]
    return _table(("what", "figure"), rows)


def _stage(stage: Mapping[str, Any]) -> list[str]:
    """The layers of a stage: what they became, then what was left alone and why."""
    changed = [layer for layer in stage["layers"] if not layer["reason"]]
    skipped = [layer for layer in stage["layers"] if layer["reason"]]
    became = [(*_group(layer), layer["becomes"], _shrunk(layer)) for layer in changed]
    left = [(*_group(layer), layer["reason"]) for layer in skipped]
    return [
        f"## {markdown_text(stage['summary'])}",
        _table(("modules", "shape", "became", "size"), became) if became else "No module was changed.",
        *(["Left as they were:", _table(("modules", "shape", "why"), left)] if left else []),
    ]


def _group(layer: Mapping[str, Any]) -> tuple[str, str]:
    name = f"{layer['pattern']} ×{layer['count']}" if layer["count"] > 1 else layer["pattern"]
    return name, "×".join(map(str, layer["shape"]))


def _shrunk(layer: Mapping[str, Any]) -> str:
    return f"{format_bytes(layer['bytes_before'])} → {format_bytes(layer['bytes_after'])}"


def place(gate: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Where the variant lies: a blocked run leaves it beside its output, and judging a finished one moves nothing."""
    moved = run["stages"] and gate["verdict"] not in ("PASS", "WAIVED")
    return f"{run['output'].rstrip('/')}.blocked" if moved else str(run["output"])


def _commands(gate: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """The command of the run, and the check of its evidence; a fence longer than any in the text."""
    lines = f"{run['command']}\ncompress verify {shlex.quote(place(gate, run))}"
    fence = "```" if "```" not in lines else "`" * (lines.count("`") + 3)
    return f"{fence}sh\n{lines}\n{fence}"


def _waiver(waiver: Mapping[str, Any]) -> str:
    metric, by, until, reason = (markdown_text(waiver[key]) for key in ("metric", "by", "until", "reason"))
    return f"- the loss of {metric} was waived by {by} until {until}: {reason}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", _list(lines)] if lines else []


def _list(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *[[markdown_text(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Names of modules, data and paths come from outside; none of them may become markup.
MARKUP = str.maketrans({char: f"\\{char}" for char in "\\`*_[]<>|#"} | {"\n": " ", "\r": " ", "&": "&amp;"})


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.translate(MARKUP)
