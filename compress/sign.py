"""`compress sign DIR key=FILE`: sign what was verified here and now."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from compress.errors import InputError, Refused
from compress.evidence_files import MANIFEST, read_gate, read_manifest
from compress.inputs import local_path
from compress.progress import step
from compress.statement import sign_statement
from compress.verify import verify

__all__ = ["show", "sign"]


def show(directory: Path, words: Mapping[str, str], *, as_json: bool) -> int:
    """Sign and print where the signature is; the exit code of the command."""
    if set(words) != {"key"}:
        raise InputError(f"give key=FILE and nothing else, not {', '.join(words) or 'nothing'}")
    envelope = sign(directory, local_path(words["key"]))
    if as_json:
        print(json.dumps({"signature": str(envelope)}))
    else:
        console = Console(highlight=False)
        console.print(f"signed: {envelope}", markup=False, soft_wrap=True)
        console.print(f"check it: compress verify {directory} --public-key PUBLIC.pem", markup=False, soft_wrap=True)
    return 0


def sign(directory: Path, key: Path) -> Path:
    """Sign the statement of evidence that holds, whatever its verdict; returns the envelope's path.

    Raises:
        InputError: no evidence, or no usable key.
        Refused: the evidence does not hold.
    """
    read_gate(directory)  # says what is missing where this is no run's output
    with step("checking files", read_manifest(directory, MANIFEST).size) as advance:
        report = verify(directory, progress=advance)
    if report.problems:
        raise Refused(f"not signed: {report.problems[0]}")
    return sign_statement(directory, key)
