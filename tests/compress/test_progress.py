"""What is shown while something works: bars on a terminal, also one inside the other, and lines in a log."""

import io
import re

import pytest
from rich.console import Console

from compress import progress


@pytest.fixture
def shown(monkeypatch):
    """shown(terminal) -> everything that was written so far, without escape codes."""
    written = io.StringIO()

    def use(terminal):
        console = Console(file=written, force_terminal=terminal, width=100, highlight=False)
        monkeypatch.setattr(progress, "console", console)
        return lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())

    return use


def test_a_bar_inside_a_step_shows_its_figures(shown):
    text = shown(True)
    with progress.step("distil", 40) as advance, progress.watched("training", 4) as show:
        for done in range(1, 5):
            advance(10)
            show(done, f"{100 * done} tokens/s, loss 0.5")
        progress.say("halfway")
    assert "training" in text() and "400 tokens/s, loss 0.5" in text() and "· halfway" in text()
    assert re.search(r"distil .*100%", text())


def test_a_path_in_a_log_stays_one_word_and_no_markup(shown):
    text, path = shown(False), "/out/" + "[bold]long/" * 30
    progress.say(f"continuing from {path}")
    with progress.step(path, 1) as advance:
        advance(1)
    assert text() == f"· continuing from {path}\n· {path}\n  {path}: 100%\n"


def test_a_log_has_the_lines_alone(shown):
    text = shown(False)
    with progress.step("distil", 40) as advance, progress.watched("training", 4) as show:
        advance(20)
        show(2, "loss 0.5")
    assert text() == "· distil\n  distil: 50%\n"


def test_a_log_shows_every_tenth_and_the_end_once(shown):
    text = shown(False)
    with progress.step("copy", 100) as advance:
        for part in (4, 8, 5, 78, 4, 1, 3):
            advance(part)
    assert text() == "· copy\n  copy: 12%\n  copy: 95%\n  copy: 100%\n"
