"""The files under `evidence/`: their names, what is in them, and reading them back without a model.

    recipe.lock.yaml         the plan (alpha, metrics with margins, data with hashes) and the resolved recipe
    samples/DATA.SIDE.jsonl  one row per sample, SIDE is baseline or variant
    manifest.json            path, size and sha256 of every file of the variant; baseline.manifest.json of the source
    environment.json, run.json, attempts.jsonl
    gate.json                every bound, every verdict, and under `binds` the hashes of all of the above
    report.md, report.html   gate.json and run.json for people, the page with samples; junit.xml for pipelines
    SHA256SUMS               hashes of all files above, in the form `sha256sum -c` reads
    test-result.intoto.json  the verdict as an in-toto statement about the files; test-result.dsse.json signs it

The hashes form a chain: SHA256SUMS -> gate.json -> lock, rows, manifests -> weights, so that one changed byte breaks
the link above it. Who rewrites every link consistently goes unseen, unless the sha256 of SHA256SUMS, the seal, is kept
or signed elsewhere.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from compress.errors import InputError, Refused
from compress.inputs import parse_json
from compress.manifest import EVIDENCE, Manifest, canonical_json, sha256_file
from compress.replace import moved_aside
from evals.gate import Metric
from evals.pairing import Row

__all__ = [
    "BASELINE_MANIFEST",
    "GATE",
    "LOCK",
    "MANIFEST",
    "SCHEMA_VERSION",
    "SIDES",
    "SUMS",
    "Plan",
    "read_gate",
    "read_json",
    "read_lock",
    "read_manifest",
    "read_rows",
    "read_sums",
    "samples_file",
    "seal",
]

SCHEMA_VERSION = 1
SIDES = ("baseline", "variant")
GATE = "gate.json"
LOCK = "recipe.lock.yaml"
MANIFEST = "manifest.json"
BASELINE_MANIFEST = "baseline.manifest.json"
SUMS = "SHA256SUMS"
GATE_FIELDS = {
    "verdict": str,
    "exit_code": int,
    "alpha": float,
    "refusals": list,
    "metrics": list,
    "binds": dict,
}
METRIC_FIELDS = {"id": str, "extra": dict}
BINDS_FIELDS = {"baseline_manifest": str, "variant_manifest": str, "plan": str, "files": dict, "rows": dict}


@dataclass(frozen=True)
class Plan:
    """What was to be decided, fixed before anything was measured. `data` describes each sample set, hash included."""

    alpha: float
    metrics: tuple[Metric, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Plain data for the lock; `from_record` is its inverse."""
        metrics = [{**asdict(metric), "looks": list(metric.looks)} for metric in self.metrics]
        return {"alpha": self.alpha, "metrics": metrics, "data": dict(self.data)}

    @classmethod
    def from_record(cls, record: Any) -> "Plan":
        """The plan of a lock; `Refused` if it cannot be judged by."""
        try:
            metrics = tuple(Metric(**{**fields, "looks": tuple(fields["looks"])}) for fields in record["metrics"])
            return cls(float(record["alpha"]), metrics, dict(record["data"]))
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"{LOCK} holds no plan to judge by: {error}") from error

    @property
    def digest(self) -> str:
        """sha256 over the canonical JSON of the plan: two runs with one digest ask the same question."""
        return hashlib.sha256(canonical_json(self.record())).hexdigest()


def samples_file(data: str, side: str) -> str:
    """Path below evidence/ of the rows of one side; the name of the data is percent-encoded, so any name is safe."""
    return f"samples/{quote(data, safe='')}.{side}.jsonl"


def seal(directory: Path) -> str:
    """sha256 of SHA256SUMS: one value that stands for all the evidence, to be kept or signed elsewhere."""
    return sha256_file(directory / EVIDENCE / SUMS)


def read_gate(directory: Path) -> dict[str, Any]:
    """gate.json of a run's output. Raises `InputError` if there is none and `Refused` if it cannot be read."""
    path = directory / EVIDENCE / GATE
    for place in (directory, path.parent):
        if old := moved_aside(place):
            raise InputError(
                f"{place} is missing: a run was killed while it replaced it; run it again, or rename {old} back"
            )
    if not path.is_file():
        raise InputError(f"{directory} holds no {EVIDENCE}/{GATE}; give the directory that a run has written")
    gate = read_json(path)
    if gate.get("schema_version") != SCHEMA_VERSION:
        raise Refused(f"{GATE} has schema version {gate.get('schema_version')!r}, this program reads {SCHEMA_VERSION}")
    _shape("", gate, GATE_FIELDS)
    _shape("binds.", gate["binds"], BINDS_FIELDS)
    for metric in gate["metrics"]:
        _shape("metrics.", metric, METRIC_FIELDS)
    return gate


def read_manifest(directory: Path, name: str) -> Manifest:
    """The manifest of the variant or of the baseline; `Refused` if it is missing or damaged."""
    return Manifest.from_record(read_json(directory / EVIDENCE / name))


def read_sums(directory: Path) -> dict[str, str]:
    """SHA256SUMS as path -> sha256; `Refused` if it is missing or damaged."""
    try:
        lines = (directory / EVIDENCE / SUMS).read_text(encoding="utf-8").splitlines()
        pairs = [line.split("  ", 1) for line in lines]
        return {name: digest for digest, name in pairs}
    except (OSError, ValueError) as error:
        raise Refused(f"{SUMS} cannot be read: {error}") from error


def read_lock(directory: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan in recipe.lock.yaml and the resolved recipe beside it; `Refused` if there is none."""
    try:
        lock = yaml.safe_load((directory / EVIDENCE / LOCK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise Refused(f"{LOCK} cannot be read: {' '.join(str(error).split())}") from error
    plan = Plan.from_record(lock.get("plan") if isinstance(lock, dict) else None)
    if not isinstance(lock.get("recipe"), dict):
        raise Refused(f"{LOCK} holds no recipe")
    return plan, lock["recipe"]


def read_rows(directory: Path, data: str, side: str) -> list[Row]:
    """The stored rows of one side; `Refused` if they are missing or damaged."""
    name = samples_file(data, side)
    try:
        rows = [parse_json(line) for line in (directory / EVIDENCE / name).read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise Refused(f"{name} cannot be read: {error}") from error
    if not all(isinstance(row, dict) and "id" in row for row in rows):
        raise Refused(f"{name} holds a line that is no row with an id")
    return rows


def _shape(where: str, found: Any, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            raise Refused(f"{GATE} has no {where}{name} of type {kind.__name__}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; `Refused` if the file is missing or holds something else."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Refused(f"{path.name} holds no JSON object")
    return found
