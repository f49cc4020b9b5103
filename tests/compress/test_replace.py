"""One directory in the place of another, killed at any step."""

import fcntl
import os
from pathlib import Path

import pytest

from compress.errors import InputError
from compress.evidence_files import read_gate
from compress.replace import moved_aside, publish, restore
from compress.staging import Places, recover


@pytest.fixture
def pair(tmp_path):
    """An old directory and a new one that is to take its place."""
    for name in ("out", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
    return tmp_path / "new", tmp_path / "out"


@pytest.fixture
def killed(pair, monkeypatch):
    """The place of an output whose overwrite was killed between its two renames."""
    new, out = pair

    def rename(self, target, move=Path.rename):
        if self == new:
            raise KeyboardInterrupt
        return move(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", rename)
        publish(new, out, overwrite=True)
    return out


def test_it_replaces_only_when_told(pair):
    new, out = pair
    with pytest.raises(InputError, match="exists: choose another output or add --overwrite"):
        publish(new, out, overwrite=False)
    assert (out / "who").read_text() == "out"
    publish(new, out, overwrite=True)
    assert (out / "who").read_text() == "new" and os.listdir(out.parent) == ["out"]


def test_nothing_is_restored_where_nothing_was_lost(pair):
    new, out = pair
    assert not restore(out) and moved_aside(out) is None
    publish(new, out, overwrite=True)
    assert not restore(out) and not restore(out.parent / "never")


def test_the_next_run_brings_the_old_output_back(killed, capsys):
    recover(Places(str(killed)))
    assert (killed / "who").read_text() == "out"
    said = capsys.readouterr().err
    assert said.endswith("is back: a run was killed while it replaced it\n")
    assert sorted(os.listdir(killed.parent)) == ["new", "out"]


def test_who_reads_it_meanwhile_is_told_where_it_is(killed):
    with pytest.raises(InputError) as told:
        read_gate(killed)
    assert str(told.value) == (
        f"{killed} is missing: a run was killed while it replaced it; "
        f"run it again, or rename {killed.parent / '.out.old'} back"
    )


def test_a_lost_output_is_left_to_the_run_that_replaces_it(killed):
    places = Places(str(killed))
    with places.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another run writes"):
            recover(places)
    assert not killed.exists()
