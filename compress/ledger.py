"""The attempts on each checkpoint, kept outside of every output, so that a verdict cannot be lost by deleting one.

attempts/CHECKPOINT/attempts.jsonl   a line per question that was asked about these bytes, with its verdict
attempts/CHECKPOINT/QUESTION/        what both sides scored, to give the same verdict again

CHECKPOINT is the digest of the variant's manifest. A question is the plan, the source, how both are scored, and the
version of this program (not of the libraries under it, or every update would be another throw of the dice): the same
question is not asked twice, its stored scores are judged again and nothing is measured. Another one (new data,
another margin) is an attempt more, which the evidence of every later run shows. It all lies in the user's cache
directory; whoever deletes that starts anew, and machines do not know of each other.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compress import __version__
from compress.evaluation import Measured, is_whole, read_measured, seal_results
from compress.evidence_files import Plan
from compress.manifest import canonical_json
from compress.source import cache_directory
from compress.writer import write_json

__all__ = ["Kept", "Question", "attempts", "recall", "remember"]

SIDES = ("source", "variant")
ENVIRONMENT = "environment.json"


@dataclass(frozen=True)
class Question:
    """What is asked about a checkpoint: the digests of its manifest and of the source's, the plan, how it is scored."""

    checkpoint: str
    source: str
    plan: Plan
    scoring: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Equal for two runs that ask the same."""
        parts = {"source": self.source, "plan": self.plan.record(), "scoring": self.scoring, "compress": __version__}
        return hashlib.sha256(canonical_json(parts)).hexdigest()

    @property
    def folder(self) -> Path:
        """Where everything about the checkpoint lies."""
        return cache_directory() / "attempts" / self.checkpoint


@dataclass(frozen=True)
class Kept:
    """What was scored when the question was asked first, and with which versions."""

    source: Measured
    variant: Measured
    environment: dict[str, Any]


def recall(question: Question) -> Kept | None:
    """The scores of the same question, None if it was not asked before or they are damaged."""
    folder = question.folder / question.digest
    if not is_whole(folder):
        return None
    environment = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    source, variant = (read_measured(folder / side) for side in SIDES)
    return Kept(source, variant, environment)


def attempts(question: Question) -> list[dict[str, Any]]:
    """The other questions that were asked about the same bytes, oldest first."""
    file = question.folder / "attempts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = [json.loads(line) for line in lines]
    return [attempt for attempt in found if attempt["question"] != question.digest]


def remember(question: Question, kept: Kept, gate: Mapping[str, Any]) -> None:
    """Keep the scores and write the attempt down; does nothing for a question that was asked before."""
    target = question.folder / question.digest
    if is_whole(target):
        return
    question.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".attempt.", dir=question.folder) as folder:
        work = Path(folder) / "kept"
        for side, measured in zip(SIDES, (kept.source, kept.variant), strict=True):
            _copy_scores(measured.folder, work / side)
        write_json(work / ENVIRONMENT, kept.environment)
        seal_results(work)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    with (question.folder / "attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(canonical_json(_attempt(question, gate)).decode() + "\n")


def _copy_scores(folder: Path, target: Path) -> None:
    """The rows and the summary, without the hidden states."""
    target.mkdir(parents=True)
    for file in (*folder.glob("*.jsonl"), folder / "result.json"):
        shutil.copyfile(file, target / file.name)


def _attempt(question: Question, gate: Mapping[str, Any]) -> dict[str, Any]:
    plan = question.plan
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": question.digest,
        "plan": plan.digest,
        "data": {name: found.get("sha256") for name, found in plan.data.items()},
        "margins": {metric.id: metric.margin for metric in plan.metrics},
        "verdict": gate["verdict"],
        "reason": gate["reason"],
    }
