"""Which stage lost what: the output of every stage judged by the same plan on the same samples as the final one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compress.judgement import Judgement, Side, judge
from compress.progress import say
from compress.recipe import Recipe
from compress.stage_plan import StagePlan
from evals.samples import SampleSet

__all__ = ["waterfall"]


def waterfall(
    recipe: Recipe, sets: Sequence[SampleSet], baseline: Side, plans: Sequence[StagePlan], last: Judgement, work: Path
) -> list[dict[str, Any]]:
    """The losses after each stage, for run.json; `last` is the judgement on the last one, which is not measured again.

    Raises:
        Refused: an output that cannot be measured.
    """
    found = []
    for plan in plans[:-1]:
        say(f"measuring what {plan.summary} lost")
        name = plan.result.path.name
        found.append(_entry(plan, judge(recipe, sets, baseline, plan.result.path, work / name, ledger=False)))
    return [*found, _entry(plans[-1], last)]


def _entry(plan: StagePlan, judgement: Judgement) -> dict[str, Any]:
    metrics = [
        {"id": result.metric, "kind": result.kind, "loss": result.loss, "margin": result.margin}
        for result in judgement.results
    ]
    return {"name": plan.name, "stage": plan.summary, "metrics": metrics}
