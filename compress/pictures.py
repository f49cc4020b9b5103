"""The pictures of the report as inline SVG: loss against margin and by stage, samples, documents, training, size.

matplotlib draws in stand-in colours that become CSS variables, so that one picture suits light, dark and print, and
text stays text. Every picture has a title and a description for those who cannot see it; the numbers are also in a
table beside it. No picture decides anything.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["Interval", "Point", "forest", "learning", "pareto", "ratios", "scatter", "steps"]

# Stand-in colour of each role, and the variable of the style sheet it becomes.
INK, MUTED, LINE, ACCENT, BAD, GOOD = "#010101", "#020202", "#030303", "#040404", "#050505", "#060606"
VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", ACCENT: "--accent", BAD: "--bad", GOOD: "--good"}
VERDICT_COLORS = {"PASS": GOOD, "FAIL": BAD, "INCONCLUSIVE": ACCENT, "REFUSED": MUTED}
STYLE: Any = {  # a plain mapping; the library types every key by name
    "svg.fonttype": "none",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.parse_math": False,
}
WIDTH = 4.4  # inches, 317 points: text stays legible when a phone shrinks the picture
EDGE = 3.0  # margins beyond which the forest plot ends
MOST = 2000  # points of one picture
LOSSES = (-10, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 30, 100, 1000)  # ticks, in margins
FRAME = (255, 195)  # points inside the axes of `pareto`, about
HEIGHTS = (3, 14, 25, -12, -23)  # points between a dot and the foot of its name, the best first
Box = tuple[float, float, float, float]  # left, bottom, right, top


@dataclass(frozen=True)
class Interval:
    """A metric in units of its margin; None where nothing was computed."""

    name: str
    loss: float | None
    lower: float | None
    upper: float | None
    verdict: str


@dataclass(frozen=True)
class Point:
    """A variant: bytes of its weights, worst loss in units of the margin."""

    name: str
    size: int
    loss: float
    verdict: str


def forest(intervals: Sequence[Interval]) -> str:
    """One line per metric: its loss with both bounds, against no loss (0) and the margin (1)."""

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=LINE, linewidth=1)
        axes.axvline(1, color=BAD, linewidth=1.5, linestyle="--")
        axes.axvspan(1, EDGE + 0.2, color=BAD, alpha=0.08, linewidth=0)
        for place, interval in enumerate(intervals):
            _interval(axes, place, interval)
        axes.set_yticks(range(len(intervals)), [_short(interval.name) for interval in intervals])
        axes.set_ylim(len(intervals) - 0.4, -0.6)
        axes.set_xlim(-EDGE / 2, EDGE + 0.2)
        axes.set_xticks([-1, 0, 1, 2, 3], ["−1", "no loss", "margin", "2×", "3×"])
        axes.tick_params(left=False)
        axes.set_xlabel("loss, in margins")

    text = "; ".join(f"{interval.name}: {_words(interval)}" for interval in intervals)
    return _svg("forest", "Loss with its bounds against the margin", text, draw, 0.9 + 0.42 * len(intervals))


def scatter(source: Sequence[float], variant: Sequence[float], worst: Sequence[int], *, name: str) -> str:
    """What the variant adds to the NLL per token of every sample, against the source's; a point above 0 is a sample
    that lost. `worst` are the places of the samples that are listed."""
    added = [theirs - ours for ours, theirs in zip(source, variant, strict=True)]

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=LINE, linewidth=1)
        _dots(axes, source, added, ACCENT)
        _dots(axes, [source[i] for i in worst], [added[i] for i in worst], BAD)
        axes.set(xlabel="source, nats per token", ylabel="added by the variant")

    above = sum(loss > 0 for loss in added)
    text = f"{above} of {len(added)} samples lost, from {min(added):+.4f} to {max(added):+.4f} nats per token."
    return _svg(f"scatter-{name}", f"{name}: what each sample lost", text, draw, 2.8)


def ratios(growth: Sequence[float], margin: float, *, name: str) -> str:
    """Growth of the perplexity of each document (0.02 is 2%), sorted, against the margin."""
    ordered = sorted(growth)

    def draw(axes: Axes) -> None:
        axes.axhline(0, color=LINE, linewidth=1)
        axes.axhline(100 * margin, color=BAD, linewidth=1.5, linestyle="--")
        places = range(1, len(ordered) + 1)
        axes.vlines(places, 0, [100 * value for value in ordered], color=ACCENT, linewidth=1)
        _dots(axes, places, [100 * value for value in ordered], ACCENT)
        axes.set(xlabel="document, from least to most damaged", ylabel="growth of perplexity, %")

    text = f"From {ordered[0]:+.2%} to {ordered[-1]:+.2%}; the margin for the whole is {margin:+.2%} (dashed)."
    return _svg(f"ratios-{name}", f"{name}: perplexity by document", text, draw, 2.8)


def pareto(points: Sequence[Point]) -> str:
    """Size of each variant against its worst loss; those no other beats in both are joined."""
    best = [p for p in points if not any(q.size <= p.size and q.loss <= p.loss and q != p for q in points)]
    best.sort(key=lambda point: point.size)

    def draw(axes: Axes) -> None:
        axes.axhline(1, color=BAD, linewidth=1.5, linestyle="--")
        axes.plot([p.size / 1e6 for p in best], [p.loss for p in best], color=LINE, linewidth=1.5)
        for point in points:
            axes.plot(point.size / 1e6, point.loss, "o", color=VERDICT_COLORS.get(point.verdict, ACCENT))
        axes.set_yscale("symlog", linthresh=1, linscale=1)  # what is near the margin gets the room
        axes.margins(0.15)
        low, high = axes.get_ylim()
        ticks = [tick for tick in LOSSES if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="weights, MB", ylabel="worst loss, in margins (dashed: 1)")
        _label(axes, sorted(points, key=lambda point: point.loss))

    text = "; ".join(f"{p.name}: {p.size / 1e6:.1f} MB, {p.loss:.2f} margins, {p.verdict}" for p in points)
    return _svg("pareto", "Size against loss", text, draw, 3.4)


def learning(curve: Sequence[Mapping[str, float]], *, name: str) -> str:
    """Loss and held-out KL of a training run by step, in nats per token."""
    best = min(curve, key=lambda entry: entry["kl"])

    def draw(axes: Axes) -> None:
        trained = [entry for entry in curve if "loss" in entry]
        axes.plot([e["step"] for e in trained], [e["loss"] for e in trained], color=MUTED, label="loss")
        axes.plot([e["step"] for e in curve], [e["kl"] for e in curve], "o-", color=ACCENT, label="held-out KL")
        axes.plot(best["step"], best["kl"], "o", color=GOOD, markersize=9, label="kept")
        axes.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
        axes.legend(frameon=False)

    text = f"Held-out KL from {curve[0]['kl']:.4f} to {best['kl']:.4f} at step {best['step']:.0f}, which was kept."
    return _svg(f"learning-{name}", "Loss and held-out KL by step", text, draw, 2.8)


def steps(added: Mapping[str, Sequence[float | None]], stages: Sequence[str]) -> str:
    """A waterfall for each metric, in margins: what each stage added to the loss, from what was lost before it."""
    names = [_short(stage) for stage in stages]

    def draw(axes: Axes) -> None:
        axes.axhline(1, color=BAD, linewidth=1.5, linestyle="--")
        axes.axhline(0, color=LINE, linewidth=1)
        width = 0.8 / len(added)
        for place, values in enumerate(added.values()):
            so_far = 0.0
            for stage, value in enumerate(values):
                if value is None:
                    break
                color = BAD if value > 0 else GOOD
                axes.bar(stage + (place + 0.5) * width - 0.4, value, width * 0.9, so_far, color=color)
                so_far += value
        axes.set_xticks(range(len(names)), names)
        axes.set(xlabel=f"bars from left: {', '.join(map(_short, added))}", ylabel="loss, in margins (dashed: 1)")

    words = [f"{name} {', '.join('–' if v is None else f'{v:+.2f}' for v in values)}" for name, values in added.items()]
    text = f"Stages {', '.join(stages)}; added by each, in margins: {'; '.join(words)}."
    return _svg("steps", "Loss added by each stage", text, draw, 3.0)


def _label(axes: Axes, points: Sequence[Point]) -> None:
    """The name of each dot beside it, where it covers no other name and no dot; the lowest dot chooses first."""
    scale, (width, height) = axes.transScale + axes.transLimits, FRAME
    places = [scale.transform((p.size / 1e6, p.loss)) * (width, height) for p in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for point, (x, y) in zip(points, places, strict=True):
        long = 5.8 * len(_short(point.name))
        boxes = [(x + dx, y + dy, x + dx + long, y + dy + 9) for dx in (7, -7 - long) for dy in HEIGHTS]
        free = [box for box in boxes if box[0] >= 0 and not any(_overlap(box, other) for other in taken)]
        box = (free or boxes)[0]
        taken.append(box)
        offset, at = (box[0] - x, box[1] - y), (point.size / 1e6, point.loss)
        axes.annotate(_short(point.name), at, offset, textcoords="offset points", color=INK)


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _interval(axes: Axes, place: int, interval: Interval) -> None:
    if interval.loss is None or interval.lower is None or interval.upper is None:
        axes.text(0, place, "no valid evidence", color=MUTED, va="center", ha="left")
        return
    color = VERDICT_COLORS.get(interval.verdict, ACCENT)
    low, middle, high = (_clip(value) for value in (interval.lower, interval.loss, interval.upper))
    axes.plot([low, high], [place, place], color=color, linewidth=2, solid_capstyle="butt")
    axes.plot(middle, place, ">" if interval.loss > EDGE else "o", color=color, markersize=7)


def _clip(value: float) -> float:
    return min(max(value, -EDGE / 2), EDGE)


def _words(interval: Interval) -> str:
    if interval.loss is None or interval.lower is None or interval.upper is None:
        return f"no valid evidence, {interval.verdict}"
    bounds = f"{interval.lower:.2f} to {interval.upper:.2f}"
    return f"{interval.loss:.2f} margins, bounds {bounds}, {interval.verdict}"


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def _dots(axes: Axes, x: Sequence[float], y: Sequence[float], color: str) -> None:
    stride = math.ceil(len(x) / MOST) or 1  # even thinning, so that the page stays small
    axes.plot(x[::stride], y[::stride], "o", color=color, markersize=4, markeredgewidth=0)


def _svg(key: str, title: str, description: str, draw: Callable[[Axes], Any], height: float) -> str:
    """Draw on fresh axes and return an <svg> element that can stand in a page beside others."""
    salt = re.sub(r"\W+", "-", key)
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _inline(text.getvalue(), salt, title, description)


def _inline(svg: str, prefix: str, title: str, description: str) -> str:
    """The element alone, its ids unlike those of other pictures, its colours the page's, named for screen readers."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'((?:url\(|href=")#)', rf"\g<1>{prefix}-", body)
    for color, variable in VARIABLES.items():
        body = body.replace(color, f"var({variable})")
    size = re.search(r'viewBox="[^"]+"', body)
    start = f'<svg role="img" class="picture" {size[0] if size else ""} aria-label="{_attribute(title)}">'
    named = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return start + named + body[body.index(">") + 1 :].strip()


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;", "\n": " "})
