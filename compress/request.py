"""What the parent of an evaluation and its worker say to each other, as files; importing this loads no model code."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress import errors
from compress.errors import CompressError

__all__ = ["Request", "leave_error", "raise_error", "read_rows", "write_rows"]

ERROR = "error.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to measure.

    checkpoint   directory to load
    label        "source" or "variant", for the progress bar
    engine       dtype, max_length, batch_tokens, add_bos_token, attention
    sets         sample sets as plain data, each with `max_tokens` (documents) and `compare` (whether KL is wanted)
    tasks        lm-eval tasks: name and the fields of TaskOptions
    aa_samples   samples of each set that the source scores twice
    metrics      the gate's metrics, for looks; empty: score everything
    baseline     folder of the source's results, for KL and looks; None: this is the source
    output       folder to write to
    """

    checkpoint: str
    label: str
    device: str
    trust_remote_code: bool
    engine: dict[str, Any]
    sets: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    alpha: float
    aa_samples: int
    metrics: list[dict[str, Any]]
    baseline: str | None
    output: str

    @staticmethod
    def read(path: Path) -> "Request":
        """The inverse of `write`."""
        return Request(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def leave_error(output: Path, error: CompressError) -> None:
    """Leave an error of the user's for the parent to raise."""
    found = {"type": type(error).__name__, "message": str(error)}
    (output / ERROR).write_text(json.dumps(found), encoding="utf-8")


def raise_error(output: Path) -> None:
    """Raise the error that a worker left in its output, if there is one."""
    file = output / ERROR
    if file.is_file():
        found: Mapping[str, str] = json.loads(file.read_text(encoding="utf-8"))
        raise getattr(errors, found["type"])(found["message"])


def read_rows(path: Path) -> list[Row]:
    """Rows from JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows as JSON lines; NaN was refused before."""
    path.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")
