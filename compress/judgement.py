"""Two checkpoint directories in, evidence out: hash, measure each in a process of its own, hash again, decide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.environment import environment
from compress.errors import Refused
from compress.evaluation import Measured, measure_source, measure_variant, metrics_of, scoring
from compress.evidence import Evidence
from compress.evidence_files import Plan
from compress.kv_report import long_range
from compress.ledger import Kept, Question, attempts, recall, remember
from compress.manifest import Manifest, build_manifest, compare
from compress.progress import say, step
from compress.recipe import Recipe
from evals.gate import MetricResult, decide
from evals.samples import SampleSet

__all__ = ["Judgement", "Side", "hash_side", "judge"]


@dataclass(frozen=True)
class Side:
    """A checkpoint directory and the hashes of its bytes."""

    directory: Path
    manifest: Manifest


@dataclass(frozen=True)
class Judgement:
    """Everything the evidence is made of, and what measuring cost.

    environment   of the measurement, which may be an earlier one of the same bytes
    attempts      other questions that were asked about these bytes
    recalled      nothing was measured: the scores of an earlier run are judged again
    texts         sample set -> sample -> the text that was scored
    """

    question: Question
    baseline: Side
    variant: Side
    source: Measured
    measured: Measured
    environment: dict[str, Any]
    results: list[MetricResult]
    refusals: list[str]
    attempts: list[dict[str, Any]]
    texts: dict[str, dict[str, str]]
    recalled: bool = False

    @property
    def plan(self) -> Plan:
        """What was to be decided."""
        return self.question.plan

    @property
    def rows(self) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
        """Data of a metric -> rows of the baseline, rows of the variant."""
        return {data: (self.source.rows[data], rows) for data, rows in self.measured.rows.items()}

    def evidence(self, recipe: Recipe, run: Mapping[str, Any]) -> Evidence:
        """What `write_evidence` writes."""
        return Evidence(
            plan=self.plan,
            results=self.results,
            rows=self.rows,
            baseline=self.baseline.manifest,
            variant=self.variant.manifest,
            recipe=recipe.model_dump(mode="json", exclude_none=True),
            run=run,
            environment=self.environment,
            refusals=self.refusals,
            attempts=self.attempts,
            texts=self.texts,
        )

    def costs(self) -> dict[str, Any]:
        """For run.json: what measuring took of both sides, seconds and bytes, and what it showed beside the metrics."""
        sides = {"source": self.source, "variant": self.measured}
        return {
            **long_range(self.measured.kv_cache, self.rows),
            "peak_bytes": max(side.peak_bytes for side in sides.values()),
            "evaluation_peak_bytes": {name: side.peak_bytes for name, side in sides.items()},
            "evaluation_seconds": {name: side.seconds for name, side in sides.items()},
            "recalled": self.recalled,
            **({"tasks": self.measured.tasks} if self.measured.tasks else {}),
        }

    def write_down(self, gate: Mapping[str, Any]) -> None:
        """Add the verdict to the ledger."""
        remember(self.question, Kept(self.source, self.measured, self.environment), gate)


def hash_side(directory: Path, what: str, *, links: bool = False) -> Side:
    """Hash every file of a checkpoint, with progress; `links` as `build_manifest` has it."""
    total = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    with step(f"hashing {what}", total) as advance:
        return Side(directory, build_manifest(directory, links=links, progress=advance))


def judge(
    recipe: Recipe, sets: Sequence[SampleSet], baseline: Side, variant: Path, work: Path, *, ledger: bool = True
) -> Judgement:
    """Measure and decide; `work` is a folder for the workers' files.

    With `ledger`, bytes that were judged by the same plan before are not measured again: the stored verdict stands.

    Raises:
        Refused: a side that cannot be measured, or whose bytes changed meanwhile.
    """
    side = hash_side(variant, "the variant")
    question = _question(recipe, sets, baseline, side)
    kept = recall(question) if ledger else None
    recalled = kept is not None
    if recalled:
        say("these bytes were judged by this plan before: the stored scores are judged again, nothing is measured")
    kept = kept or _measure(recipe, sets, baseline, variant, work)
    changed = compare(side.manifest, variant)
    if changed:
        raise Refused(f"the variant changed while it was measured: {changed[0]}")
    earlier = attempts(question) if ledger else []
    if earlier:
        verdicts = ", ".join(attempt["verdict"] for attempt in earlier)
        say(f"attempt {len(earlier) + 1} of these bytes; the others ended in {verdicts}")
    return Judgement(
        question=question,
        baseline=baseline,
        variant=side,
        source=kept.source,
        measured=kept.variant,
        environment=kept.environment,
        results=_decide(question.plan, kept),
        refusals=_refusals(recipe, baseline, side, kept.source, kept.variant),
        attempts=earlier,
        texts={found.name: {sample.id: sample.target for sample in found.samples} for found in sets},
        recalled=recalled,
    )


def _question(recipe: Recipe, sets: Sequence[SampleSet], baseline: Side, variant: Side) -> Question:
    data = {found.name: _describe(found) for found in sets}
    plan = Plan(recipe.gate.alpha, metrics_of(recipe), data)
    return Question(variant.manifest.digest, baseline.manifest.digest, plan, scoring(recipe, sets))


def _describe(found: SampleSet) -> dict[str, Any]:
    """What the plan says of a set; `complete`, where every problem of the source is scored: documents are cut."""
    data = {"kind": found.kind, "source": found.source, "sha256": found.sha256}
    return data | ({"complete": len(found.samples)} if found.whole and found.kind == "problems" else {})


def _measure(recipe: Recipe, sets: Sequence[SampleSet], baseline: Side, variant: Path, work: Path) -> Kept:
    source = measure_source(recipe, sets, baseline.directory, baseline.manifest)
    return Kept(source, measure_variant(recipe, sets, variant, source, work), environment())


def _decide(plan: Plan, kept: Kept) -> list[MetricResult]:
    """One result for each metric whose data was measured."""
    return [
        decide(
            metric,
            kept.source.rows[metric.data],
            kept.variant.rows[metric.data],
            alpha=plan.alpha,
            aa_difference=kept.source.aa.get(metric.data),
        )
        for metric in plan.metrics
        if metric.data in kept.variant.rows
    ]


def _refusals(recipe: Recipe, baseline: Side, variant: Side, source: Measured, measured: Measured) -> list[str]:
    """Why the two sides do not compare, beside what the rows show."""
    found = []
    if baseline.manifest.digest == variant.manifest.digest and not recipe.gate.allow_identical:
        found.append("source and variant are the same bytes: set gate.allow_identical if that is meant")
    different = sorted(key for key in source.tokenizer if source.tokenizer[key] != measured.tokenizer.get(key))
    if different:
        found.append(f"source and variant differ in {', '.join(different)}: their scores are not comparable")
    return found
