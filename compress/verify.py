"""`compress verify DIR`: recompute every hash and the verdict from what is stored; no model, no network.

Each link of the chain in `compress.evidence_files` is checked, and the stored rows are judged again by the plan in the
lock, so that any file changed on its own is named. It is no proof against somebody who rewrites all of them to agree
with each other: for that, compare the seal, which is printed, with one that was kept or signed elsewhere.

Reasons beside the rows that refused a variant are taken from gate.json, since no row shows them.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from compress.errors import Refused
from compress.evidence_files import (
    BASELINE_MANIFEST,
    GATE,
    LOCK,
    MANIFEST,
    SIDES,
    SUMS,
    Plan,
    read_gate,
    read_json,
    read_lock,
    read_manifest,
    read_rows,
    read_sums,
    seal,
)
from compress.manifest import EVIDENCE, Progress, compare, sha256_file
from compress.progress import step
from compress.statement import ENVELOPE, STATEMENT, check_signature, statement
from compress.waivers import WAIVED, exit_code, read_waivers, waive
from evals.gate import Metric, MetricResult, Outcome, decide, overall
from evals.metric import refused

__all__ = ["VerifyReport", "show", "verify"]

TELLING = ("verdict", "n", "loss", "upper", "lower")  # what is shown where much differs
MOST = 3  # numbers in one sentence
# Made after the hashes were written: signatures over them, and statements about them.
AFTERWARDS = (".sig", ".sigstore", STATEMENT, ENVELOPE)


@dataclass(frozen=True)
class VerifyReport:
    """What the evidence amounts to: the recomputed verdict, and a sentence for everything that does not hold."""

    verdict: str
    exit_code: int
    seal: str
    problems: tuple[str, ...]


def show(
    directory: Path, *, public_key: Path | None = None, accept_waivers: bool = False, as_json: bool = False
) -> int:
    """Verify and print; the exit code of the command."""
    read_gate(directory)  # says what is missing where this is no run's output
    with step("checking files", read_manifest(directory, MANIFEST).size) as advance:
        report = verify(directory, public_key=public_key, progress=advance)
    if report.verdict == WAIVED and not report.problems:
        report = replace(report, exit_code=exit_code(read_gate(directory), accept_waivers=accept_waivers))
    console = Console(highlight=False)
    if as_json:
        print(json.dumps(asdict(report)))
        return report.exit_code
    for problem in report.problems:
        console.print(Text(f"- {problem}"), soft_wrap=True)
    if report.problems:
        console.print(Text("does not hold, for the reasons above", style="bold red"))
    else:
        console.print(Text(f"holds: {report.verdict}", style="bold"))
        console.print(Text(f"seal {report.seal}", style="dim"), soft_wrap=True)
    return report.exit_code


def verify(directory: Path, *, public_key: Path | None = None, progress: Progress | None = None) -> VerifyReport:
    """Check a run's output. The exit code is that of the recomputed verdict, or 5 if anything does not hold.

    With `public_key` (PEM) the evidence must also be signed with its private half.

    Raises `InputError` where there is no evidence and `Refused` for evidence that cannot be read at all.
    """
    gate, (plan, recipe) = read_gate(directory), read_lock(directory)
    stored = {found["id"]: found for found in gate["metrics"]}
    # A FAIL may have ended the evaluation before the other metrics.
    decided = [metric for metric in plan.metrics if metric.id in stored]
    results = [_again(directory, metric, plan.alpha, stored[metric.id]) for metric in decided]
    outcome = overall(results, metrics=plan.metrics, refusals=gate["refusals"])
    outcome, waived = _waivers(outcome, results, plan, recipe, gate)
    problems = (
        *_files(directory, gate),
        *_rows(directory, gate),
        *_weights(directory, gate, progress),
        *_plan(plan, gate),
        *(problem for result in results for problem in _metric(result, stored[result.metric])),
        *_disagreement("of the whole", asdict(outcome), gate, ("verdict", "exit_code")),
        *_disagreement("of the whole", {"waivers": waived}, {"waivers": gate.get("waivers", [])}, ("waivers",)),
        *_statement(directory, gate),
        *([unsigned] if public_key and (unsigned := check_signature(directory, public_key)) else []),
    )
    code = Refused.exit_code if problems else outcome.exit_code
    return VerifyReport(outcome.verdict, code, seal(directory), problems)


def _files(directory: Path, gate: Mapping[str, Any]) -> Iterator[str]:
    """Every file of the evidence against the two lists of hashes, and both lists against the files."""
    folder = directory / EVIDENCE
    sums, binds = read_sums(directory), gate["binds"]["files"]
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    found = {name: sha256_file(path) for name, path in paths.items() if not name.endswith(AFTERWARDS) and name != SUMS}
    for name in sorted(found.keys() | sums.keys() | binds.keys()):
        lists = {SUMS: sums, GATE: binds} if name in binds else {SUMS: sums}
        wrong = [title for title, hashes in lists.items() if hashes.get(name) != found.get(name)]
        if name not in found:
            yield f"{name} is missing from the evidence"
        elif name not in sums:
            yield f"{name} was added to the evidence"
        elif wrong:
            yield f"{name} was changed: its sha256 is not the one in {' and '.join(wrong)}"


def _rows(directory: Path, gate: Mapping[str, Any]) -> Iterator[str]:
    """Lines of each file of rows against the counts in gate.json."""
    for name, count in sorted(gate["binds"]["rows"].items()):
        path = directory / EVIDENCE / name
        lines = len(path.read_bytes().splitlines()) if path.is_file() else 0
        if lines != count:
            yield f"{name} holds {lines} rows, {GATE} was decided on {count}"


def _weights(directory: Path, gate: Mapping[str, Any], progress: Progress | None) -> Iterator[str]:
    """The manifests against gate.json, then the directory against its manifest."""
    for name, bound in ((MANIFEST, "variant_manifest"), (BASELINE_MANIFEST, "baseline_manifest")):
        if read_manifest(directory, name).digest != gate["binds"][bound]:
            yield f"{name} lists other files than those that were measured"
    manifest = read_manifest(directory, MANIFEST)
    yield from map(str, compare(manifest, directory, progress=progress))


def _plan(plan: Plan, gate: Mapping[str, Any]) -> Iterator[str]:
    """The lock against gate.json."""
    if plan.digest != gate["binds"]["plan"]:
        yield f"{LOCK} holds another plan than the one that was decided by"
    if not _same(plan.alpha, gate["alpha"]):
        yield f"alpha is {plan.alpha} in {LOCK} and {gate['alpha']} in {GATE}"
    unknown = [metric["id"] for metric in gate["metrics"] if metric["id"] not in {known.id for known in plan.metrics}]
    if unknown:
        yield f"{GATE} holds results of {', '.join(map(str, unknown))}, which {LOCK} does not name"


def _waivers(
    outcome: Outcome, results: Sequence[MetricResult], plan: Plan, recipe: Mapping[str, Any], gate: Mapping[str, Any]
) -> tuple[Outcome, list[dict[str, str]]]:
    """The outcome with the waivers of the recipe as they stood on the day it was decided, for the bytes it names."""
    try:
        waivers, day = read_waivers(recipe), date.fromisoformat(gate.get("decided_on", date.max.isoformat()))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{LOCK} and {GATE} hold no waivers that can be read: {error}") from error
    checkpoint = gate["binds"]["variant_manifest"]
    outcome, waived = waive(outcome, results, waivers, metrics=plan.metrics, checkpoint=checkpoint, today=day)
    return outcome, [waiver.record() for waiver in waived]


def _statement(directory: Path, gate: Mapping[str, Any]) -> Iterator[str]:
    """The in-toto statement, where there is one, against what gate.json and the manifest give."""
    path = directory / EVIDENCE / STATEMENT
    if path.is_file() and read_json(path) != statement(directory, gate, read_manifest(directory, MANIFEST)):
        yield f"{STATEMENT} does not say what {GATE} and {MANIFEST} say"


def _again(directory: Path, metric: Metric, alpha: float, stored: Mapping[str, Any]) -> MetricResult:
    """Judge the stored rows; rows that cannot be read refuse."""
    extra = stored["extra"]
    difference = math.nan if extra.get("aa_difference", 0.0) is None else extra.get("aa_difference")  # null: not finite
    try:
        sides = [read_rows(directory, metric.data, side) for side in SIDES]
    except Refused as refusal:
        return refused(metric, 0, str(refusal))
    return decide(metric, *sides, alpha=alpha, aa_difference=difference)


def _metric(result: MetricResult, stored: Mapping[str, Any]) -> Iterator[str]:
    """Stored numbers of a metric against recomputed ones; wording may change between versions and is not compared."""
    again = result.record()
    names = again.keys() - {"reason", "extra"}
    yield from _disagreement(
        f"of {result.metric}", again | again["extra"], stored | stored["extra"], {*names, *stored["extra"]}
    )


def _disagreement(
    what: str, again: Mapping[str, Any], stored: Mapping[str, Any], names: Iterable[str]
) -> Iterator[str]:
    """One sentence for all of `names` that are not what the rows give."""
    wrong = [name for name in sorted(names) if not _same(again.get(name), stored.get(name))]
    if wrong:
        shown = wrong if len(wrong) <= MOST else [name for name in TELLING if name in wrong][:MOST] or wrong[:MOST]
        more = f" (and {len(wrong) - len(shown)} more)" if len(wrong) > len(shown) else ""
        said, given = (", ".join(f"{name} {side.get(name)}" for name in shown) for side in (stored, again))
        yield f"{GATE} says {what}: {said}; the stored rows and {LOCK} give {given}{more}"


def _same(ours: Any, theirs: Any) -> bool:
    """Equal, numbers up to what another version of the libraries may round differently; null stands for not finite."""
    if not isinstance(ours, float):
        return type(ours) is type(theirs) and bool(ours == theirs)
    if not math.isfinite(ours):
        return theirs is None
    return isinstance(theirs, int | float) and math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)
