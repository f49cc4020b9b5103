"""What a word problem is before its numbers are drawn: a story, the ranges of its numbers, and the steps that solve it.

In a step, `[total = a * b]` stands for an equation: it is worked out from left to right on the numbers drawn so far,
written as "6 * 4 = 24", and `total` can be used from there on. The last equation is the answer. `evals.problems` draws
the numbers again until every equation gives a whole number above 1, so ranges need not be chosen with care.

`{name}`, `{other}`, `{third}` are three different people; `{they}`, `{They}`, `{their}` belong to the first of them.
The stories are in `evals.stories_amounts` and `evals.stories_money`.
"""

from dataclasses import dataclass, field
from typing import Final

__all__ = ["GOODS", "PEOPLE", "PRICEY", "SMALL", "Template"]

Range = tuple[int, int] | tuple[int, int, int]  # lowest, highest (included), and the step between them


@dataclass(frozen=True)
class Template:
    """A kind of problem; `words` are interchangeable nouns of the story."""

    name: str
    question: str
    steps: tuple[str, ...]
    numbers: dict[str, Range]
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)


PEOPLE: Final = (
    ("Maria", "she", "her"),
    ("Tom", "he", "his"),
    ("Aisha", "she", "her"),
    ("Daniel", "he", "his"),
    ("Sofia", "she", "her"),
    ("Kenji", "he", "his"),
    ("Olivia", "she", "her"),
    ("Samuel", "he", "his"),
    ("Priya", "she", "her"),
    ("Lukas", "he", "his"),
    ("Hannah", "she", "her"),
    ("Omar", "he", "his"),
    ("Grace", "she", "her"),
    ("Peter", "he", "his"),
    ("Elena", "she", "her"),
    ("Victor", "he", "his"),
)

SMALL: Final = ("pencils", "marbles", "stickers", "cookies", "shells", "buttons", "beads", "cards")
GOODS: Final = ("notebooks", "lamps", "scarves", "toy cars", "mugs", "umbrellas", "baskets", "puzzles")
PRICEY: Final = ("bicycle", "camera", "guitar", "tent", "sewing machine", "telescope", "desk", "phone")
