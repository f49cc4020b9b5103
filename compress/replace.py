"""Putting a finished directory in the place of another, so that a kill loses neither.

There is no portable way to exchange two directories in one step: the old one is moved aside to `.NAME.old`, the new one
is renamed into place, the old one is removed. Killed between the two renames, NAME is missing and `.NAME.old` holds
what it was; `restore` brings it back, and `moved_aside` says where it is.
"""

import os
import shutil
from pathlib import Path

from compress.errors import InputError

__all__ = ["fsync_directory", "moved_aside", "publish", "restore"]


def publish(staged: Path, target: Path, *, overwrite: bool) -> None:
    """Rename a finished directory into place: `target` is what it was, the new one, or missing and to be restored.

    Raises:
        InputError: `target` exists and `overwrite` is false.
    """
    if target.exists() and not overwrite:
        raise InputError(f"{target} exists: choose another output or add --overwrite")
    fsync_directory(staged)
    old = _aside(target)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    staged.rename(target)
    fsync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def restore(target: Path) -> bool:
    """Bring back what a killed `publish` had moved aside; whether there was such a thing."""
    old = moved_aside(target)
    if old is not None:
        old.rename(target)
        fsync_directory(target.parent)
    return old is not None


def moved_aside(target: Path) -> Path | None:
    """Where a killed `publish` has left the old `target`; None if `target` is there, or never was."""
    old = _aside(target)
    return old if old.is_dir() and not target.exists() else None


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _aside(target: Path) -> Path:
    return target.parent / f".{target.name}.old"
