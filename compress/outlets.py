"""Where else a finished run is shown: GitHub's step summary and MLflow, each where its own variable is set.

GITHUB_STEP_SUMMARY   the report is appended to this file
MLFLOW_TRACKING_URI   a run with sizes, losses and bounds as metrics, hashes as tags, and the evidence as artefacts

Neither decides anything, and what they cannot take does not change how the command ends: it is said, and the evidence
is on disk.
"""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.errors import InputError
from compress.evidence_files import seal
from compress.manifest import EVIDENCE
from compress.progress import say

__all__ = ["check_outlets", "show_elsewhere"]

SUMMARY, TRACKING = "GITHUB_STEP_SUMMARY", "MLFLOW_TRACKING_URI"
LIMIT = 1 << 20  # bytes of one step's summary; GitHub shows nothing of a longer one
BOUNDS = ("baseline", "variant", "loss", "lower", "upper", "margin", "n")


def check_outlets() -> None:
    """Refuse before the work what would only be noticed after it.

    Raises:
        InputError: runs are to be tracked and mlflow is not installed.
    """
    if os.environ.get(TRACKING) and importlib.util.find_spec("mlflow") is None:
        raise InputError(f"{TRACKING} is set and mlflow is missing: pip install 'compress-gate[mlflow]', or unset it")


def show_elsewhere(directory: Path, gate: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Show the output of a run wherever the environment asks for it."""
    if path := os.environ.get(SUMMARY):
        _append(Path(path), directory / EVIDENCE / "report.md")
    if os.environ.get(TRACKING):
        _track(directory, gate, run)


def _append(summary: Path, report: Path) -> None:
    """Add the report to the step's summary, or a line where it would not fit."""
    text = report.read_text(encoding="utf-8") + "\n"
    used = summary.stat().st_size if summary.exists() else 0
    if used + len(text.encode()) > LIMIT:
        text = f"{text.splitlines()[0]}\n\nThe report is too long for here.\n"
    with summary.open("a", encoding="utf-8") as file:
        file.write(text)


def _track(directory: Path, gate: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    import mlflow
    from mlflow.exceptions import MlflowException

    try:
        # Of a tracking server mlflow prints addresses on standard output, which is that of --json.
        with contextlib.redirect_stdout(sys.stderr), mlflow.start_run(run_name=directory.name):
            stages = "; ".join(stage["summary"] for stage in run["stages"])
            mlflow.log_params({"source": run["source"], "stages": stages or "none", "command": run["command"]})
            mlflow.log_metrics(_metrics(gate, run))
            mlflow.set_tags(_tags(directory, gate))
            mlflow.log_artifacts(str(directory / EVIDENCE), artifact_path=EVIDENCE)
    except (MlflowException, OSError) as error:
        say(f"MLflow did not take the run ({error}); it is in {directory / EVIDENCE}")


def _metrics(gate: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, float]:
    """Sizes, and of each metric the bounds and what else was counted: perplexities, flips, agreement."""
    sizes = {name: float(run[name]) for name in ("bytes_before", "bytes_after", "seconds")}
    numbers = [(m["id"], {name: m[name] for name in BOUNDS} | m["extra"]) for m in gate["metrics"]]
    found = {f"{name}/{key}": value for name, values in numbers for key, value in values.items()}
    return sizes | {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _tags(directory: Path, gate: Mapping[str, Any]) -> dict[str, str]:
    binds = {name: gate["binds"][name] for name in ("variant_manifest", "baseline_manifest", "plan")}
    verdicts = {f"verdict/{metric['id']}": metric["verdict"] for metric in gate["metrics"]}
    return {"verdict": gate["verdict"], **verdicts, "seal": seal(directory), **binds}
