"""`compress push DIR repo=ORG/NAME`: publish what passed, and nothing else.

The evidence is verified first, from the stored rows and against the bytes at hand; only a PASS (or a waived loss that
is accepted here and now) goes on. What is sent is the manifest's files, the evidence, and a card.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from compress.card import model_card, read_card_input
from compress.errors import GateFailed, Inconclusive, Refused
from compress.evidence_files import MANIFEST, read_gate, read_manifest
from compress.hub import CARD, Parcel, Pushed, deliver, hub, read_card
from compress.manifest import EVIDENCE, FileEntry, sha256_file
from compress.progress import say, step
from compress.push_options import PushOptions
from compress.verify import VerifyReport, verify
from compress.waivers import WAIVED, expired

__all__ = ["push", "show"]

BLOCKS = {error.exit_code: error for error in (GateFailed, Inconclusive, Refused)}


def show(directory: Path, options: PushOptions, *, accept_waivers: bool = False, as_json: bool = False) -> int:
    """Push and print where it is; the exit code of the command."""
    pushed = push(directory, options, accept_waivers=accept_waivers)
    if as_json:
        print(json.dumps(asdict(pushed)))
        return 0
    console = Console(highlight=False)
    what = "pull request" if pushed.pull_request else f"{pushed.repo} at {pushed.revision}"
    console.print(f"published {what}: {pushed.url}", markup=False, soft_wrap=True)
    console.print(f"commit {pushed.commit}; the hub holds the bytes of the manifest", markup=False, soft_wrap=True)
    return 0


def push(directory: Path, options: PushOptions, *, accept_waivers: bool = False) -> Pushed:
    """Publish the output of a run.

    Raises:
        InputError: no evidence, or a card that cannot be read.
        GateFailed, Inconclusive, Refused: the evidence does not hold, or its verdict does not allow it.
        PushFailed: it could not be published as it is.
    """
    gate = read_gate(directory)  # says what is missing where this is no run's output
    with step("checking files", read_manifest(directory, MANIFEST).size) as advance:
        report = verify(directory, progress=advance)
    _allow(report, gate, accept_waivers=accept_waivers)
    api = hub()
    card = model_card(read_card_input(directory, options.base_model), options.repo, _existing(directory, options))
    manifest = read_manifest(directory, MANIFEST)
    parcel = Parcel(directory, (*manifest.files, *_evidence(directory)), card, manifest.digest)
    say(f"sending {len(parcel.files) + 1} files to {options.repo}")
    return deliver(api, parcel, options)


def _allow(report: VerifyReport, gate: Mapping[str, Any], *, accept_waivers: bool) -> None:
    if report.problems:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise Refused(f"not published: {report.problems[0]}{more}")
    if report.verdict == WAIVED and accept_waivers:
        ended = expired(gate, date.today())
        if ended:
            raise BLOCKS[report.exit_code](f"not published: the waiver of {', '.join(ended)} has ended")
        return
    if report.verdict != "PASS":
        hint = ": add --accept-waivers if that is meant" if report.verdict == WAIVED else ""
        raise BLOCKS[report.exit_code](f"not published: the verdict is {report.verdict}{hint}")


def _existing(directory: Path, options: PushOptions) -> str | None:
    """The card to merge into: the hub's, else the one beside the weights."""
    local = directory / CARD
    return read_card(hub(), options) or (local.read_text(encoding="utf-8") if local.is_file() else None)


def _evidence(directory: Path) -> list[FileEntry]:
    paths = sorted(path for path in (directory / EVIDENCE).rglob("*") if path.is_file())
    return [FileEntry(p.relative_to(directory).as_posix(), p.stat().st_size, sha256_file(p)) for p in paths]
