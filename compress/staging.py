"""Where a run works before anything is published, and who may work there.

out/fp8            appears in one rename, and only on PASS
out/fp8.blocked    the variant that was not allowed out, with its evidence
out/.fp8.staging   one folder per stage while the run works; a later run with the same key continues there
out/.fp8.lock      held while a run works
out/.fp8.old       the output before, while it is replaced; brought back if a kill left it there
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.amounts import format_bytes
from compress.errors import Diverged, InputError, ProcessLost
from compress.inputs import local_path, parse_json
from compress.manifest import EVIDENCE
from compress.progress import say
from compress.replace import fsync_directory, moved_aside, publish, restore
from compress.writer import free_bytes, write_json

__all__ = ["Places", "check_output", "recover", "settle", "staging"]

KEY = "key.json"
HEADROOM = 1.02  # side files, headers, evidence


class Places:
    """The four paths of an output.

    Raises:
        InputError: no path, or the root, beside which nothing can be made.
    """

    def __init__(self, output: str) -> None:
        self.output = Path(os.path.abspath(local_path(output)))  # without `..`, which has no place beside it
        if not self.output.name:
            raise InputError(f"output {output!r} is the root of the disk: choose a directory in it")
        self.blocked = self.output.with_name(f"{self.output.name}.blocked")
        self.staging = self.output.with_name(f".{self.output.name}.staging")
        self.lock = self.output.with_name(f".{self.output.name}.lock")


def recover(places: Places) -> None:
    """Bring back an output that a killed run had moved aside and not replaced.

    Raises:
        InputError: another run works on this output.
    """
    lost = [place for place in (places.output, places.blocked) if moved_aside(place)]
    if not lost:
        return
    with _locked(places):
        for place in lost:
            if restore(place):
                say(f"{place} is back: a run was killed while it replaced it")


def check_output(places: Places, source: Path, needed: int, *, overwrite: bool) -> None:
    """Everything about the output that can be wrong before the work.

    Raises:
        InputError: it exists, is no output of ours, lies in the source or around it, or the disk is too small.
    """
    output, origin = places.output.resolve(), source.resolve()
    if output == origin or output.is_relative_to(origin) or origin.is_relative_to(output):
        raise InputError(f"output {places.output} and source {source} lie in each other: choose another output")
    for place in (places.output, places.blocked):
        if (place.exists() and not place.is_dir()) or place.is_symlink():
            raise InputError(f"{place} exists and is no directory: choose another output")
        if place.exists() and not overwrite:
            raise InputError(f"{place} exists: choose another output or add --overwrite")
        if place.exists() and any(place.iterdir()) and not (place / EVIDENCE).is_dir():
            raise InputError(f"{place} was not written by a run, so it is not overwritten: choose another output")
    parent = next(folder for folder in output.parents if folder.exists())
    if not parent.is_dir():
        raise InputError(f"output {output} lies in {parent}, which is a file: choose another output")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"output {output} lies in {parent}, where you may not write: choose another output")
    free = free_bytes(places.output)
    if needed * HEADROOM > free:
        raise InputError(
            f"the run needs {format_bytes(int(needed * HEADROOM))} in {output.parent}, {format_bytes(free)} are free: "
            "free space or choose another output"
        )


@contextlib.contextmanager
def staging(places: Places, key: dict[str, object]) -> Iterator[Path]:
    """The staging folder, alone: kept from an earlier run with the same key, empty otherwise.

    An interrupt, a lost process or a failure that is no sentence (a GPU's memory) keeps finished stages for the next
    run, training that diverged what is to be looked at; an error of the input or a full disk removes everything.

    Raises:
        InputError: another run works on this output.
    """
    created = _make_parents(places.output.parent)
    try:
        with _locked(places):
            try:
                _prepare(places.staging, key)
                yield places.staging
            except (KeyboardInterrupt, Diverged, ProcessLost, RuntimeError, MemoryError):
                _drop_partial(places.staging)
                raise
            except BaseException:
                (places.staging / KEY).unlink(
                    missing_ok=True
                )  # first: what a kill leaves of the rest is not gone on with
                shutil.rmtree(places.staging, ignore_errors=True)
                raise
    finally:
        for folder in created:
            with contextlib.suppress(OSError):  # not empty: the output is in it
                folder.rmdir()


@contextlib.contextmanager
def _locked(places: Places) -> Iterator[None]:
    """The output alone."""
    with places.lock.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another run writes {places.output}: wait for it or choose another output") from error
        try:
            yield
        finally:
            places.lock.unlink(missing_ok=True)


def _make_parents(folder: Path) -> list[Path]:
    """Create the folders above the output; those that were not there, innermost first."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _prepare(folder: Path, key: dict[str, object]) -> None:
    stored = folder / KEY
    if _stored_key(stored) == key:
        _drop_partial(folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_json(stored, key)


def _stored_key(file: Path) -> Any:
    """The key of an earlier run; None where there is none, or one that was cut off while it was written."""
    try:
        return parse_json(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _drop_partial(folder: Path) -> None:
    for leftover in [*folder.glob("*.partial"), *folder.glob(f"*/{EVIDENCE}"), folder / "evaluation"]:
        shutil.rmtree(leftover, ignore_errors=True)


def settle(places: Places, variant: Path, *, passed: bool, overwrite: bool) -> Path:
    """Move the variant with its evidence to where its verdict sends it; returns that place."""
    target = places.output if passed else places.blocked
    publish(variant, target, overwrite=overwrite)
    if passed and overwrite:
        shutil.rmtree(places.blocked, ignore_errors=True)
    shutil.rmtree(places.staging, ignore_errors=True)
    fsync_directory(target.parent)
    return target
