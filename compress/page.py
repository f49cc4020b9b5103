"""`evidence/report.html`: a run as one page that needs no network and no script.

The page is made from plain data (gate.json, run.json, the rows) by templates that escape everything: names, texts and
answers come from models and data sets, which are not to be trusted. Its content policy forbids scripts and requests
even if something slipped through. The numbers are those of gate.json; nothing is computed anew but what is only shown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from compress.amounts import format_bytes, format_change, format_loss, format_score
from compress.fit import fit_lines
from compress.kv_report import sections, token_bytes
from compress.layer_errors import layer_errors
from compress.pictures import Interval, forest, learning, ratios, scatter, steps
from compress.report import COLUMNS, claim, headline, metric_cells, place
from compress.sample_view import Sides, View, views, worst
from compress.stage_report import added_losses, curves, stage_sections

__all__ = ["PageInput", "intervals", "render", "report_html"]

WORST = 8  # samples shown of each set
EXCERPT = 400  # characters of a text
MOST = 500  # documents listed one by one
MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("memory while measured", "evaluation_peak_bytes", format_bytes),
    ("time to measure", "evaluation_seconds", lambda seconds: f"{seconds:.1f} s"),
)
ATTEMPT = ("when", "plan", "verdict", "reason")  # what is shown of an earlier attempt


@dataclass(frozen=True)
class PageInput:
    """What a page shows beside gate.json and run.json.

    rows         data -> rows of the baseline, rows of the variant
    texts        data -> sample id -> the text that was scored
    environment  as environment.json
    attempts     as attempts.jsonl
    """

    rows: Mapping[str, Sides]
    texts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    attempts: Sequence[Mapping[str, Any]] = ()


def report_html(gate: Mapping[str, Any], run: Mapping[str, Any], found: PageInput) -> str:
    """The whole page. Raises nothing of its own: evidence that was refused is shown as such."""
    return render(
        "report.html.j2",
        title=f"{gate['verdict']}: {run['output']}",
        gate=gate,
        run=run,
        place=place(gate, run),
        headline=_sentence(headline(gate)),
        claim=claim(gate) if gate["verdict"] == "PASS" else "",
        columns=COLUMNS,
        optional=any(not metric["required"] for metric in gate["metrics"]),
        metrics=[metric_cells(metric) for metric in gate["metrics"]],
        forest=Markup(forest(intervals(gate))),
        data=[_data(name, sides, gate, found.texts.get(name, {})) for name, sides in found.rows.items()],
        sections=[*stage_sections(run), *sections(run)],
        pictures=_pictures(run),
        sizes=_sizes(run),
        stages=[_stage(stage) for stage in run["stages"]],
        environment=_environment(found.environment),
        attempts=[tuple(str(attempt.get(key, "–")) for key in ATTEMPT) for attempt in found.attempts],
    )


def render(template: str, **context: Any) -> str:
    """A page from a template of the package; a name the template does not get is an error."""
    loader = PackageLoader("compress", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = format_bytes
    style, _, _ = loader.get_source(environment, "style.css")
    return environment.get_template(template).render(style=Markup(style), **context)


def intervals(gate: Mapping[str, Any]) -> list[Interval]:
    """Each metric of gate.json in units of its margin."""

    def scaled(metric: Mapping[str, Any], name: str) -> float | None:
        return None if metric[name] is None else float(metric[name] / metric["margin"])

    return [
        Interval(m["id"], scaled(m, "loss"), scaled(m, "lower"), scaled(m, "upper"), m["verdict"])
        for m in gate["metrics"]
    ]


def _sentence(headline: str) -> str:
    """Without the verdict before it, which is the heading."""
    words = headline.partition(": ")[2]
    return words[:1].upper() + words[1:]


def _data(name: str, sides: Sides, gate: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """One sample set: its pictures, and the samples that lost most."""
    found = views(sides)
    places = worst(found, WORST)
    answers = any("score" in row for row in sides[1])
    drawn = len(found) > 1 and not answers
    scored = [view.source for view in found], [view.variant for view in found]
    return {
        "name": name,
        "count": len(found),
        "answers": answers,
        "lost": sum(view.loss > 0 for view in found),
        "gained": sum(view.loss < 0 for view in found),
        "scatter": Markup(scatter(*scored, places, name=name)) if drawn else "",
        "documents": _documents(name, found, gate) if drawn else {},
        "worst": [_shown(found[place], texts) for place in places],
    }


def _documents(name: str, found: Sequence[View], gate: Mapping[str, Any]) -> dict[str, Any]:
    """Perplexity by document as picture and rows, where a metric judges the perplexity of this data."""
    margins = [m["margin"] for m in gate["metrics"] if m["data"] == name and m["kind"] == "log_perplexity"]
    if not margins:
        return {}
    # Beyond 700 nats a perplexity is no float64; such a variant needs no picture to be believed broken.
    growth = [math.expm1(min(view.loss, 700.0)) for view in found]
    kind = "log_perplexity"
    rows = [
        (view.id, format_score(kind, view.source), format_score(kind, view.variant), format_loss(kind, view.loss))
        for view in found[:MOST]
    ]
    return {"picture": Markup(ratios(growth, math.expm1(margins[0]), name=name)), "rows": rows}


def _shown(view: View, texts: Mapping[str, str]) -> dict[str, Any]:
    source, variant = view.said
    return {
        "view": view,
        "text": _cut(texts.get(view.id, "")),
        "said": (_cut(source), _cut(variant)) if source or variant else None,
    }


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"


def _pictures(run: Mapping[str, Any]) -> dict[str, Markup]:
    """Beside which section of what the stages did."""
    found = {f"Training: {name}": Markup(learning(curve, name=name)) for name, curve in curves(run).items()}
    waterfall = run.get("waterfall")
    if waterfall:
        margins = {metric["id"]: metric["margin"] for metric in waterfall[0]["metrics"]}
        added = {
            name: [None if loss is None else loss / margins[name] for loss in losses]
            for name, losses in added_losses(waterfall).items()
        }
        found["Loss by stage"] = Markup(steps(added, [stage["name"] for stage in waterfall]))
    return found


def _sizes(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What changed between source and variant: figure, before, after."""
    before, after = run["bytes_before"], run["bytes_after"]
    rows = [("weights", format_bytes(before), format_change(before, after))]
    if kv := token_bytes(run):
        rows.append(("KV cache of a token", format_bytes(kv[0]), format_change(*kv)))
    for what, key, write in MEASURED:
        if key in run:
            rows.append((what, write(run[key]["source"]), write(run[key]["variant"])))
    return [*rows, *fit_lines(run)]


def _environment(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """environment.json as rows, packages one each."""
    flat = {key: value for key, value in found.items() if key != "packages"} | dict(found.get("packages", {}))
    return [(key, ", ".join(value) if isinstance(value, list) else str(value)) for key, value in flat.items() if value]


def _stage(stage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": stage["summary"],
        "seconds": stage.get("seconds"),
        "changed": [_layer(layer) for layer in stage["layers"] if not layer["reason"]],
        "left": [_layer(layer) for layer in stage["layers"] if layer["reason"]],
        "errors": layer_errors(stage.get("report", {})),
    }


def _layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    weights = layer["count"] * math.prod(layer["shape"])
    return {
        "name": layer["pattern"] if layer["count"] == 1 else f"{layer['pattern']} ×{layer['count']}",
        "shape": "×".join(map(str, layer["shape"])),
        "becomes": layer["becomes"],
        "reason": layer["reason"],
        "bits": f"{8 * layer['bytes_after'] / weights:.2f}" if weights else "–",
        "before": layer["bytes_before"],
        "after": layer["bytes_after"],
    }
