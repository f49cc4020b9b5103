"""Progress on long work: bars with rates and remaining time on a terminal, one line per step elsewhere.

Everything goes to standard error, so that `--json` on standard output stays clean.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Advance", "console", "say", "step"]

Advance = Callable[[int], None]  # called with units of work as they are done

console = Console(stderr=True, highlight=False)
EVERY = 0.1  # fraction between lines where there is no terminal


def say(text: str) -> None:
    """One line about what happens now."""
    console.print(f"[dim]·[/dim] {text}")


@contextmanager
def step(text: str, total: int) -> Iterator[Advance]:
    """A bar over `total` units of work; yields `advance(units)`."""
    if console.is_terminal:
        with _bar() as bar:
            task = bar.add_task(text, total=total)
            yield lambda amount: bar.advance(task, amount)
    else:
        yield _lines(text, total)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=True),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _lines(text: str, total: int) -> Advance:
    """Lines at every tenth, for logs."""
    done, shown = 0, 0.0
    say(text)

    def advance(amount: int) -> None:
        nonlocal done, shown
        done += amount
        fraction = done / total if total else 1.0
        if fraction >= shown + EVERY:
            shown = fraction
            console.print(f"  {text}: {min(fraction, 1):.0%}")

    return advance
