"""What a report says about training and about which stage lost what, as tables of words; pictures are drawn beside it.

run.json then holds

    stages[].report.curve   of a distill stage: step, kl (held out, nats per token), loss (mean since the entry before)
    stages[].report.bits            of a quantize stage: layer -> stored bits per weight
    stages[].report.weight_errors   of one that rounds to nearest: layer -> squared error of its weights, relative
    stages[].report.blocks[].layers of a calibrated one: layer -> error, squared, of its output, relative; and more
    stages[].report.blocks[].expert_tokens   of a calibrated quantize stage: tokens the router sent to each expert
    stages[].report.blocks[].learned         of one that learned: iterations, loss_before, loss_after
    stages[].report.expert_floor             tokens of each batch that every expert is shown at least
    stages[].search         of a stage that tried several sizes, best first: a row each of dims, parameters and kl
    stages[].report.draft   of a draft stage: what `distill.speculation.speculate` measured, and both sizes
    waterfall               where each stage was judged: name, stage (its summary), metrics: id, kind, loss, margin;
                            losses from the source up to and with that stage, null where nothing was computed
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from compress.amounts import format_loss
from compress.kv_report import DASH, Section

__all__ = ["added_losses", "curves", "stage_sections"]

Stages = Sequence[Mapping[str, Any]]

RAREST = 12  # experts that are listed


def curves(run: Mapping[str, Any]) -> dict[str, Sequence[Mapping[str, float]]]:
    """The curve of every stage that was trained, by the stage's summary."""
    reports = {stage["summary"]: stage.get("report", {}) for stage in run["stages"]}
    return {summary: report["curve"] for summary, report in reports.items() if report.get("curve")}


def stage_sections(run: Mapping[str, Any]) -> list[Section]:
    """The parts of a report, none where run.json has nothing of the kind."""
    found = [_waterfall(run["waterfall"])] if run.get("waterfall") else []
    found += [_search(stage["summary"], stage["search"]) for stage in run["stages"] if "search" in stage]
    found += [_curve(summary, curve) for summary, curve in curves(run).items()]
    found += [part for stage in run["stages"] for part in _learned(stage["summary"], stage.get("report", {}))]
    found += [part for stage in run["stages"] for part in _experts(stage["summary"], stage.get("report", {}))]
    drafts = [stage["report"]["draft"] for stage in run["stages"] if "draft" in stage.get("report", {})]
    return found + [_draft(draft) for draft in drafts]


def added_losses(waterfall: Stages) -> dict[str, list[float | None]]:
    """Metric -> what each stage added to its loss; None where a loss is missing on either side of the stage."""
    found: dict[str, list[float | None]] = {}
    for place, metric in enumerate(waterfall[0]["metrics"]):
        losses = [0.0, *(stage["metrics"][place]["loss"] for stage in waterfall)]
        found[metric["id"]] = [None if None in step else step[1] - step[0] for step in pairwise(losses)]
    return found


def _waterfall(waterfall: Stages) -> Section:
    added = added_losses(waterfall)
    header = (
        "stage",
        *(f"{metric['id']}: {what}" for metric in waterfall[0]["metrics"] for what in ("added", "so far")),
    )
    rows = []
    for place, stage in enumerate(waterfall):
        cells = [stage["stage"]]
        for metric in stage["metrics"]:
            cells += [format_loss(metric["kind"], value) for value in (added[metric["id"]][place], metric["loss"])]
        rows.append(tuple(cells))
    text = "Every stage's output was measured on the same samples. A loss below zero is one that the stage won back."
    return Section("Loss by stage", text, header, rows)


def _learned(summary: str, report: Mapping[str, Any]) -> list[Section]:
    """What learned rounding won in each block."""
    blocks = {block["block"]: block["learned"] for block in report.get("blocks", ()) if "learned" in block}
    if not blocks:
        return []
    rows: list[tuple[str, ...]] = [
        (name, f"{found['loss_before']:.3%}", f"{found['loss_after']:.3%}") for name, found in blocks.items()
    ]
    iterations = next(iter(blocks.values()))["iterations"]
    text = (
        f"{iterations} iterations a block; squared error of its output, relative to each token's energy, on the "
        "calibration tokens. Where nothing better was found, compensated codes stay."
    )
    return [Section(f"Learned rounding: {summary}", text, ("block", "compensated", "learned"), rows)]


def _experts(summary: str, report: Mapping[str, Any]) -> list[Section]:
    """The experts that the router chose for too few calibration tokens, and what was done about it."""
    counts = {name: n for block in report.get("blocks", ()) for name, n in block.get("expert_tokens", {}).items()}
    floor = report.get("expert_floor", 0)
    few = sorted((n, name) for name, n in counts.items() if n < floor)
    if not few:
        return []
    text = (
        f"The router sent fewer than {floor} calibration tokens to {len(few)} of {len(counts)} experts. Each expert is "
        f"shown at least {floor} tokens of every batch, others of the batch where the router sends fewer, so it is "
        "calibrated on inputs of its layer all the same. More calibration samples make this rarer."
    )
    rows: list[tuple[str, ...]] = [(name, str(n)) for n, name in few[:RAREST]]
    return [Section(f"Experts seldom chosen: {summary}", text, ("expert", "tokens"), rows)]


def _search(summary: str, found: Stages) -> Section:
    text = (
        "Every row was pruned on part of the calibration texts and scored by KL from its source, in nats per token, on "
        "others; the first was then made."
    )
    rows = [tuple(f"{cell:.4f}" if key == "kl" else f"{cell:,}" for key, cell in row.items()) for row in found]
    return Section(f"Split: {summary}", text, tuple(found[0]), rows)


def _draft(draft: Mapping[str, Any]) -> Section:
    text = (
        f"Measured on {draft['tokens']} tokens that the target wrote greedily after {draft['prompts']} prompts that "
        f"were held out. draft/ asks for {draft['guesses']} guesses per round, the best by these figures. The measured "
        "speed-up is that of transformers' assisted generation on this machine, one text at a time. "
        f"In short, {draft['worth']}."
    )
    rows: list[tuple[str, ...]] = [
        ("parameters, draft and target", f"{draft['parameters']:,} and {draft['target_parameters']:,}"),
        ("guesses accepted", f"{draft['acceptance_rate']:.1%}"),
        ("tokens per pass of the target", f"{draft['acceptance_length']:.2f}"),
        ("chance that a sampled guess is accepted", f"{draft['alpha']:.3f}"),
        ("time of a draft's token, in the target's", f"{draft['cost']:.3f}"),
        ("speed-up expected from what was accepted", f"{draft['expected_speedup']:.2f}"),
        ("speed-up by the formula, sampled", f"{draft['formula_speedup']:.2f}"),
        ("speed-up measured", f"{draft['measured_speedup']:.2f}"),
    ]
    return Section("Draft", text, ("figure", "value"), rows)


def _curve(summary: str, curve: Sequence[Mapping[str, float]]) -> Section:
    best = min(curve, key=lambda entry: entry["kl"])
    text = (
        f"Held-out KL, nats per token, went from {curve[0]['kl']:.4f} to {best['kl']:.4f} at step {best['step']:.0f}, "
        "the state that was kept. The loss is the mean since the row before."
    )
    rows: list[tuple[str, ...]] = [
        (f"{entry['step']:.0f}", f"{entry['loss']:.4f}" if "loss" in entry else DASH, f"{entry['kl']:.4f}")
        for entry in curve
    ]
    return Section(f"Training: {summary}", text, ("step", "loss", "held-out KL"), rows)
