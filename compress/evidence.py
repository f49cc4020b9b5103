"""Writing `evidence/` into a staging directory that is renamed into place with the weights.

The verdict is computed here from the results, so that none can be written that does not follow. Numbers that JSON
cannot say (NaN, infinity) are written as null, which the gate refuses just as well. What the files are and how they
bind each other is said in `compress.evidence_files`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from compress import __version__
from compress.errors import InputError
from compress.evidence_files import (
    BASELINE_MANIFEST,
    GATE,
    LOCK,
    MANIFEST,
    SCHEMA_VERSION,
    SIDES,
    SUMS,
    Plan,
    samples_file,
)
from compress.junit import junit_xml
from compress.manifest import EVIDENCE, Manifest, canonical_json, sha256_file
from compress.report import report_markdown
from compress.statement import write_statement
from compress.waivers import read_waivers, waive
from evals.gate import MetricResult, overall
from evals.pairing import Row

__all__ = ["Evidence", "write_evidence"]


@dataclass(frozen=True)
class Evidence:
    """All that is written.

    rows      data of a metric -> rows of the baseline, rows of the variant
    recipe    the resolved recipe, defaults included
    run       what was done, as `compress.report` describes it
    refusals  reasons beside the rows why the sides do not compare
    attempts  earlier verdicts on these bytes
    texts     data of a metric -> sample id -> the text that was scored, of which the report shows the worst
    """

    plan: Plan
    results: Sequence[MetricResult]
    rows: Mapping[str, tuple[Sequence[Row], Sequence[Row]]]
    baseline: Manifest
    variant: Manifest
    recipe: Mapping[str, Any]
    run: Mapping[str, Any]
    environment: Mapping[str, Any]
    refusals: Sequence[str] = ()
    attempts: Sequence[Mapping[str, Any]] = ()
    texts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def write_evidence(directory: Path, evidence: Evidence) -> dict[str, Any]:
    """Write `directory`/evidence, its hashes last, and return what gate.json holds.

    Raises `InputError` if there is evidence already.
    """
    folder = directory / EVIDENCE
    if folder.exists():
        raise InputError(f"{folder} exists already; evidence is written once")
    (folder / "samples").mkdir(parents=True)
    rows = _write_rows(folder, evidence)
    lock = {"schema_version": SCHEMA_VERSION, "plan": evidence.plan.record(), "recipe": evidence.recipe}
    _write(folder / LOCK, yaml.safe_dump(_plain(lock), sort_keys=False, allow_unicode=True))
    _write(folder / MANIFEST, _pretty(evidence.variant.record()))
    _write(folder / BASELINE_MANIFEST, _pretty(evidence.baseline.record()))
    _write(folder / "environment.json", _pretty(evidence.environment))
    _write(folder / "run.json", _pretty(evidence.run))
    gate: dict[str, Any] = _plain({**_verdict(evidence), "binds": _binds(folder, evidence, rows)})
    _write(folder / GATE, _pretty(gate))
    _write(folder / "report.md", report_markdown(gate, _plain(evidence.run)))
    from compress.page import PageInput, report_html  # brings the plotting library

    shown = PageInput(evidence.rows, evidence.texts, evidence.environment, evidence.attempts)
    _write(folder / "report.html", report_html(gate, _plain(evidence.run), shown))
    _write(folder / "junit.xml", junit_xml(gate))
    _write(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in _hashes(folder).items()))
    write_statement(directory, gate, evidence.variant)
    return gate


def _write_rows(folder: Path, evidence: Evidence) -> dict[str, int]:
    """Write every list of rows; the number of lines of each file."""
    files = {"attempts.jsonl": evidence.attempts}
    for data, sides in evidence.rows.items():
        files |= {samples_file(data, side): rows for side, rows in zip(SIDES, sides, strict=True)}
    for name, rows in files.items():
        _write(folder / name, "".join(canonical_json(_plain(row)).decode() + "\n" for row in rows))
    return {name: len(rows) for name, rows in files.items()}


def _verdict(evidence: Evidence) -> dict[str, Any]:
    metrics, today = evidence.plan.metrics, date.today()
    outcome = overall(evidence.results, metrics=metrics, refusals=evidence.refusals)
    waivers = read_waivers(evidence.recipe)
    outcome, waived = waive(
        outcome, evidence.results, waivers, metrics=metrics, checkpoint=evidence.variant.digest, today=today
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "compress": __version__,
        **asdict(outcome),
        "alpha": evidence.plan.alpha,
        "refusals": list(evidence.refusals),
        "metrics": [result.record() for result in evidence.results],
        **({"waivers": [waiver.record() for waiver in waived], "decided_on": today.isoformat()} if waivers else {}),
    }


def _binds(folder: Path, evidence: Evidence, rows: Mapping[str, int]) -> dict[str, Any]:
    return {
        "baseline_manifest": evidence.baseline.digest,
        "variant_manifest": evidence.variant.digest,
        "plan": evidence.plan.digest,
        "files": _hashes(folder),
        "rows": dict(rows),
    }


def _hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file written so far, by path below `folder`."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: sha256_file(files[name]) for name in sorted(files)}


def _plain(value: Any) -> Any:
    """The same value out of dicts, lists, text, finite numbers and null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _pretty(record: Any) -> str:
    return json.dumps(_plain(record), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
