"""Progress on long work: bars with rates and remaining time on a terminal, one line per step elsewhere.

Everything goes to standard error, so that `--json` on standard output stays clean. Where there is no terminal a line is
never wrapped: a log has no width, and a path in it must stay one word.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

__all__ = ["Advance", "console", "say", "silence", "step", "watched"]

Advance = Callable[[int], None]  # called with units of work as they are done

console = Console(stderr=True, highlight=False)
EVERY = 0.1  # fraction between lines where there is no terminal
WINDOW = 1800  # seconds that the remaining time is estimated from, where a unit can take minutes


def say(text: str) -> None:
    """One line about what happens now."""
    _print(Text.assemble(("·", "dim"), f" {text}"))


def silence() -> None:
    """Show nothing from here on: another process does."""
    console.quiet = True


@contextmanager
def step(text: str, total: int) -> Iterator[Advance]:
    """A bar over `total` units of work; yields `advance(units)`."""
    if console.is_terminal:
        with _bar(BarColumn(), TaskProgressColumn(show_speed=True), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task(text, total=total)
            yield lambda amount: bar.advance(task, amount)
    else:
        yield _lines(text, total)


@contextmanager
def watched(text: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A second bar inside a step, for work that is followed by its figures; yields `show(units done in all, figures)`.

    Nothing is shown where there is no terminal: `say` there what a log should keep.
    """
    if not console.is_terminal:
        yield lambda done, figures: None
        return
    with _bar(BarColumn(12), TimeRemainingColumn(), TextColumn("{task.fields[figures]}"), window=WINDOW) as bar:
        task = bar.add_task(text, total=total, figures="")
        yield lambda done, figures: bar.update(task, completed=done, figures=figures)


def _bar(*columns: ProgressColumn, window: float = 30) -> Progress:
    return Progress(TextColumn("{task.description}"), *columns, console=console, speed_estimate_period=window)


def _lines(text: str, total: int) -> Advance:
    """Lines at every tenth, for logs."""
    done, shown = 0, 0.0
    say(text)

    def advance(amount: int) -> None:
        nonlocal done, shown
        done += amount
        fraction = done / total if total else 1.0
        if fraction >= min(shown + EVERY, 1) > shown:
            shown = fraction
            _print(Text(f"  {text}: {min(fraction, 1):.0%}"))

    return advance


def _print(line: Text) -> None:
    console.print(line, soft_wrap=not console.is_terminal)
