"""What is left of a run that ended early."""

import pytest

from compress.errors import Diverged, InputError, ProcessLost
from compress.staging import Places, staging


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (Diverged("nan"), True),
        (KeyboardInterrupt(), True),
        (ProcessLost("gone"), True),
        (RuntimeError("out of memory"), True),
        (InputError("no"), False),
        (OSError("full"), False),
    ],
    ids=repr,
)
def test_finished_stages_and_journals_outlive_what_is_no_error_of_the_input(tmp_path, error, kept):
    places = Places(str(tmp_path / "out"))
    with pytest.raises(type(error)), staging(places, {"key": 1}) as folder:
        for name in ("0-prune", "1-distill.journal", "1-distill.partial"):
            (folder / name).mkdir()
        raise error
    left = sorted(path.name for path in tmp_path.glob(".out.staging/*"))
    assert left == (["0-prune", "1-distill.journal", "key.json"] if kept else [])
    with staging(places, {"key": 1}) as folder:
        assert (folder / "1-distill.journal").exists() is kept
