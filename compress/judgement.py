"""Two checkpoint directories in, evidence out: hash, measure each in a process of its own, hash again, decide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.environment import environment
from compress.errors import Refused
from compress.evaluation import Measured, measure_source, measure_variant, metrics_of
from compress.evidence import Evidence
from compress.evidence_files import Plan
from compress.manifest import Manifest, build_manifest, compare
from compress.progress import step
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
    """Everything the evidence is made of, and what measuring cost."""

    plan: Plan
    baseline: Side
    variant: Side
    source: Measured
    measured: Measured
    results: list[MetricResult]
    refusals: list[str]

    def evidence(self, recipe: Recipe, run: Mapping[str, Any]) -> Evidence:
        """What `write_evidence` writes."""
        return Evidence(
            plan=self.plan,
            results=self.results,
            rows={data: (self.source.rows[data], rows) for data, rows in self.measured.rows.items()},
            baseline=self.baseline.manifest,
            variant=self.variant.manifest,
            recipe=recipe.model_dump(mode="json", exclude_none=True),
            run=run,
            environment=environment(),
            refusals=self.refusals,
        )


def hash_side(directory: Path, what: str) -> Side:
    """Hash every file of a checkpoint, with progress."""
    total = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    with step(f"hashing {what}", total) as advance:
        return Side(directory, build_manifest(directory, progress=advance))


def judge(recipe: Recipe, sets: Sequence[SampleSet], baseline: Side, variant: Path, work: Path) -> Judgement:
    """Measure and decide; `work` is a folder for the workers' files.

    Raises:
        Refused: a side that cannot be measured, or whose bytes changed meanwhile.
    """
    side = hash_side(variant, "the variant")
    metrics = metrics_of(recipe)
    source = measure_source(recipe, sets, baseline.directory, baseline.manifest)
    measured = measure_variant(recipe, sets, variant, source, work)
    changed = compare(side.manifest, variant)
    if changed:
        raise Refused(f"the variant changed while it was measured: {changed[0]}")
    results = [
        decide(
            metric,
            source.rows[metric.data],
            measured.rows[metric.data],
            alpha=recipe.gate.alpha,
            aa_difference=source.aa.get(metric.data, 0.0),
        )
        for metric in metrics
        if metric.data in measured.rows
    ]
    data = {found.name: {"kind": found.kind, "source": found.source, "sha256": found.sha256} for found in sets}
    plan = Plan(recipe.gate.alpha, metrics, data)
    refusals = _refusals(recipe, baseline, side, source, measured)
    return Judgement(plan, baseline, side, source, measured, results, refusals)


def _refusals(recipe: Recipe, baseline: Side, variant: Side, source: Measured, measured: Measured) -> list[str]:
    """Why the two sides do not compare, beside what the rows show."""
    found = []
    if baseline.manifest.digest == variant.manifest.digest and not recipe.gate.allow_identical:
        found.append("source and variant are the same bytes: set gate.allow_identical if that is meant")
    different = sorted(key for key in source.tokenizer if source.tokenizer[key] != measured.tokenizer.get(key))
    if different:
        found.append(f"source and variant differ in {', '.join(different)}: their scores are not comparable")
    return found
