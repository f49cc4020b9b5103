"""A run from recipe to verdict: plan, stages, both sides measured, the gate, evidence, and only then the rename."""

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from compress import __version__
from compress.amounts import format_bytes, format_change
from compress.checkpoint import Checkpoint
from compress.device import resolve_device
from compress.evaluation import check_tasks, load_sets
from compress.evidence import write_evidence
from compress.fit import check_fit, fit_lines, fit_record
from compress.judgement import Judgement, hash_side, judge
from compress.kv_report import token_bytes
from compress.manifest import EVIDENCE
from compress.outlets import check_outlets, show_elsewhere
from compress.preview import group_layers, preview_record, show_preview
from compress.progress import say, step
from compress.recipe import Recipe, Stage
from compress.recipe_file import load_recipe
from compress.report import headline, result_table
from compress.source import check_usable, fetch_source, peek_source
from compress.stages import Place, StagePlan, plan_stages, read_report, run_stage
from compress.staging import Places, check_output, recover, settle, staging
from compress.waivers import exit_code
from compress.waterfall import waterfall
from evals.samples import SampleSet

if TYPE_CHECKING:
    from compress.hub import Pushed

__all__ = ["run", "show_result"]


@dataclass(frozen=True)
class Job:
    """A run that has been planned: everything was checked that can be checked from headers."""

    recipe: Recipe
    command: str
    source: Checkpoint
    places: Places
    plans: list[StagePlan]
    sets: list[SampleSet]
    place: Place
    stages: tuple[Stage, ...]


def run(
    name: str, overrides: Sequence[str], *, dry_run: bool, overwrite: bool, accept_waivers: bool, as_json: bool
) -> int:
    """Carry out a recipe; returns the exit code of the verdict, 0 for a dry run.

    Raises:
        CompressError: what cannot be done, before or while it is done.
    """
    started = time.monotonic()
    job = _plan(name, overrides, overwrite=overwrite, weights=not dry_run)
    if dry_run and as_json:
        print(json.dumps(preview_record(job.recipe, job.source, job.plans), indent=2))
        return 0
    if dry_run:
        show_preview(job.recipe, job.source, job.plans, job.sets)
        return 0
    baseline = hash_side(job.source.path, "the source", links=True)
    with staging(job.places, _key(job, baseline.manifest.digest)) as folder:
        job, stages = _run_stages(job)
        variant = job.plans[-1].result.path
        judgement = judge(job.recipe, job.sets, baseline, variant, folder / "evaluation")
        record = _record(job, stages, judgement, time.monotonic() - started)
        if job.recipe.gate.stages:
            work = folder / "evaluation"
            record["waterfall"] = waterfall(job.recipe, job.sets, baseline, job.plans, judgement, work)
        found = write_evidence(variant, judgement.evidence(job.recipe, record))
        judgement.write_down(found)
        code = exit_code(found, accept_waivers=accept_waivers)
        target = settle(job.places, variant, passed=code == 0, overwrite=overwrite)
    show_elsewhere(target, found, record)
    pushed = None
    try:
        if job.recipe.push and code == 0:
            from compress.push import push  # brings the hub's client

            pushed = push(target, job.recipe.push, accept_waivers=accept_waivers)
    finally:  # the verdict is shown even where publishing fails
        show_result(found, record, target, pushed=pushed, as_json=as_json)
    return code


def _plan(name: str, overrides: Sequence[str], *, overwrite: bool, weights: bool) -> Job:
    """Everything that can be refused before the work, refused."""
    recipe = load_recipe(name, overrides)
    resolve_device(recipe.device)
    check_outlets()
    if recipe.push:
        from compress.hub import check_login  # brings the hub's client

        check_login(recipe.push)
    places = Places(recipe.output)
    wanted = (recipe.model, recipe.revision, say)
    source = Checkpoint.open(fetch_source(*wanted)) if weights else peek_source(*wanted)
    check_usable(source, trust_remote_code=recipe.trust_remote_code)
    sets = load_sets(recipe)
    place = Place(places.staging, recipe.max_shard_size, sets, recipe.trust_remote_code)
    plans = plan_stages(recipe.stages, source, place)
    check_fit(recipe.fit, plans[-1].result)
    recover(places)
    check_output(places, source.path, sum(plan.shards.nbytes for plan in plans), overwrite=overwrite)
    check_tasks(recipe)
    command = shlex.join(["compress", "run", f"recipe={name}", *overrides])
    return Job(recipe, command, source, places, plans, sets, place, recipe.stages)


def _key(job: Job, source: str) -> dict[str, object]:
    """What the stages' output depends on: an earlier run with the same key is continued."""
    stages = [stage.model_dump(mode="json") for stage in job.recipe.stages]
    evaluated = [found.sha256 for found in job.sets]  # which calibration keeps away from
    return {
        "version": __version__,
        "source": source,
        "stages": stages,
        "shards": job.recipe.max_shard_size,
        "evaluated": evaluated,
    }


def _run_stages(job: Job) -> tuple[Job, list[dict[str, Any]]]:
    """Run every stage; the job as it came to be where a choice was left to the data, and the entries of run.json."""
    entries = []
    for i in range(len(job.plans)):
        plan = job.plans[i]
        found: list[dict[str, Any]] = []
        if plan.decide is not None:
            with step(f"{plan.name}: which split", plan.source.nbytes) as advance:
                options, found = plan.decide(resolve_device(job.recipe.device), advance)
            stages = list(job.stages)
            stages[i] = stages[i].model_copy(update={plan.name: options})
            job = replace(job, stages=tuple(stages), plans=plan_stages(stages, job.source, job.place))
        entry = _run_stage(job.plans[i], job.recipe)
        entries.append(entry | ({"search": found} if found else {}))
    return job, entries


def _run_stage(plan: StagePlan, recipe: Recipe) -> dict[str, Any]:
    """Run one stage, unless an earlier run has finished it; returns its entry of run.json."""
    started = time.monotonic()
    if plan.result.path.is_dir():
        say(f"{plan.summary}: done by an earlier run, continuing from there")
        report = read_report(plan)
    else:
        with step(plan.summary, plan.source.nbytes) as advance:
            report = run_stage(plan, resolve_device(recipe.device), advance)
    return {
        "name": plan.name,
        "summary": plan.summary,
        "seconds": round(time.monotonic() - started, 2),
        "layers": [asdict(group) for group in group_layers(plan.layers)],
        "report": report,
    }


def _record(job: Job, stages: list[dict[str, Any]], judgement: Judgement, seconds: float) -> dict[str, Any]:
    """run.json."""
    return {
        "command": job.command,
        "source": job.recipe.model,
        "output": job.recipe.output,
        "stages": stages,
        "bytes_before": job.source.nbytes,
        "bytes_after": job.plans[-1].shards.nbytes,
        "seconds": round(seconds, 2),
        **fit_record(job.recipe.fit, job.source, job.plans[-1].result),
        **judgement.costs(),
    }


def show_result(
    found: Mapping[str, Any], record: Mapping[str, Any], target: Path, *, pushed: "Pushed | None" = None, as_json: bool
) -> None:
    """The result on standard output: table, sizes, verdict in words, where it lies."""
    if as_json:
        published = asdict(pushed) if pushed else None
        json.dump({"output": str(target), "gate": found, "run": record, "pushed": published}, sys.stdout, indent=2)
        print()
        return
    console = Console(highlight=False)
    console.print(result_table(found))
    before, after = record["bytes_before"], record["bytes_after"]
    console.print(f"weights {format_bytes(before)} → {format_change(before, after)}")
    if kv := token_bytes(record):
        console.print(f"KV cache of a token {format_bytes(kv[0])} → {format_change(*kv)}")
    for where, _, variant in fit_lines(record):
        console.print(f"{where}: {variant}", markup=False, soft_wrap=True)
    console.print(headline(found), markup=False, soft_wrap=True)
    console.print(f"{target}  (evidence in {target / EVIDENCE})", markup=False, soft_wrap=True)
    if pushed:
        console.print(f"published: {pushed.url}", markup=False, soft_wrap=True)
