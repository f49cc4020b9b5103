"""Problems with an answer to score: generated ones, GSM8K through `datasets`, or a file of one's own.

"arithmetic" needs no download and never runs short. It draws numbers for the templates of `evals.stories` with
a seeded generator and writes the solution step by step as GSM8K does, ending in "The answer is 24." The text depends on
nothing but the seed: only `Random.random()` is used, whose stream Python guarantees.

A problem is its template with its numbers; names and nouns are dressing. Each problem belongs by its hash to the split
"eval" or to "calibration", so what calibrated a model can never be what it is judged on, whatever the seeds and counts.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import add, mul, sub
from pathlib import Path
from typing import Any, Final, Literal, get_args

from compress.errors import InputError
from evals.documents import hub_rows, read_rows, string_field
from evals.recall import recall
from evals.stories import PEOPLE, Template
from evals.stories_amounts import AMOUNTS
from evals.stories_money import MONEY

Split = Literal["eval", "calibration"]

TEMPLATES: Final = (*AMOUNTS, *MONEY)
POOL: Final = 1024  # problems drawn at least, so that a larger count extends a smaller one up to here
PATIENCE: Final = 1000  # draws in a row without a new problem: then the templates have no more
_EQUATION: Final = re.compile(r"\[(\w+) = ([^\]]+)\]")
_ANNOTATION: Final = re.compile(r"<<.*?>>")

Values = dict[str, str | int]


@dataclass(frozen=True)
class Problem:
    """A question, its worked solution, and the whole number it comes to."""

    template: str
    numbers: tuple[int, ...]
    question: str
    solution: str
    answer: int


def read_problems(
    source: str,
    *,
    count: int | None = None,
    seed: int = 0,
    columns: tuple[str, str] = ("question", "answer"),
    split: Split = "eval",
    words: int | None = None,
) -> list[tuple[str, str, str]]:
    """(id, context, target) of the problems of a named source or a .jsonl or .parquet file, in its own order.

    `columns` are those of question and answer in a file; `split` chooses among the generated ones, at least `count` of
    which are given; `words` is the length of the text of "recall". Raises InputError.
    """
    if source in SOURCES:
        return SOURCES[source](count=count, seed=seed, split=split, words=words)
    path = Path(source)
    return [
        (f"{path.stem}/{i}", *_prompt(*(string_field(path, i, row, (column,)) for column in columns)))
        for i, row in enumerate(read_rows(source, SOURCES))
    ]


def _arithmetic(*, count: int | None, seed: int, split: Split, **_: Any) -> list[tuple[str, str, str]]:
    pool = max(POOL, 1 << ((count or POOL) - 1).bit_length())
    drawn = islice(arithmetic(seed=seed, split=split), pool)
    return [(f"arithmetic/{split}/{i}", *_prompt(p.question, p.solution)) for i, p in enumerate(drawn)]


def _gsm8k(**_: Any) -> list[tuple[str, str, str]]:
    rows = hub_rows("openai/gsm8k", "main", "test")
    return [(f"gsm8k/{i}", *_prompt(row["question"], row["answer"])) for i, row in enumerate(rows)]


def _prompt(question: str, answer: str) -> tuple[str, str]:
    """Context and target; GSM8K's calculator annotations <<6*4=24>> are no part of a solution."""
    return f"Question: {question}\nAnswer:", f" {_ANNOTATION.sub('', answer)}"


def arithmetic(*, seed: int, split: Split = "eval") -> Iterator[Problem]:
    """Problems without end, no two with the same template and numbers; InputError if the templates have no more."""
    if split not in get_args(Split):
        raise InputError(f"split {split!r} of the arithmetic problems is unknown, use {' or '.join(get_args(Split))}")
    rng = random.Random(int.from_bytes(hashlib.sha256(f"{split}:{seed}".encode()).digest()))
    seen: set[tuple[str, tuple[int, ...]]] = set()
    draws = 0
    while draws < PATIENCE:
        draws += 1
        problem = _draw(rng)
        if problem is None or split_of(problem) != split or (problem.template, problem.numbers) in seen:
            continue
        seen.add((problem.template, problem.numbers))
        draws = 0
        yield problem
    raise InputError(f"there are no more than {len(seen)} arithmetic problems of the split {split!r}, lower count")


def split_of(problem: Problem) -> Split:
    """The split a problem belongs to: one bit of the hash of its template and numbers."""
    digest = hashlib.sha256(f"{problem.template}:{problem.numbers}".encode()).digest()
    return "eval" if digest[0] & 1 else "calibration"


def _draw(rng: random.Random) -> Problem | None:
    """A problem of a template chosen evenly, or None if its numbers do not come out."""
    template = TEMPLATES[_below(rng, len(TEMPLATES))]
    words = {name: choices[_below(rng, len(choices))] for name, choices in template.words.items()}
    dressing: Values = {**_people(rng), **words}
    tries = (_write(template, dressing, rng) for _ in range(PATIENCE))
    return next((problem for problem in tries if problem), None)


def _write(template: Template, dressing: Values, rng: random.Random) -> Problem | None:
    """The problem with fresh numbers, or None unless every equation gives a whole number above 1."""
    numbers = {name: _number(rng, *limits) for name, limits in template.numbers.items()}
    results = _results(template, numbers)
    if min(results.values()) < 2:
        return None
    values = dressing | numbers | results
    steps = [_EQUATION.sub(lambda found: _written(found, values), step).format(**values) for step in template.steps]
    answer = list(results.values())[-1]
    solution = " ".join([*steps, f"The answer is {answer}."])
    return Problem(template.name, tuple(numbers.values()), template.question.format(**values), solution, answer)


def _results(template: Template, numbers: dict[str, int]) -> dict[str, int]:
    """The result of each equation of the steps under its name, worked out from left to right."""
    known = dict(numbers)
    for name, terms in _EQUATION.findall(" ".join(template.steps)):
        first, *rest = terms.split()
        known[name] = _operand(first, known)
        for operator, term in zip(rest[::2], rest[1::2], strict=True):
            known[name] = _OPERATORS[operator](known[name], _operand(term, known))
    return {name: known[name] for name in known if name not in numbers}


def _operand(term: str, known: dict[str, int]) -> int:
    return int(term) if term.isdigit() else known[term]


def _written(equation: re.Match[str], values: Values) -> str:
    """`[total = a * b]` as "6 * 4 = 24"."""
    return " ".join(str(values.get(term, term)) for term in [*equation[2].split(), "=", equation[1]])


def _exact(dividend: int, divisor: int) -> int:
    """The quotient; 0, which no equation may give, if there is a rest."""
    return 0 if dividend % divisor else dividend // divisor


def _people(rng: random.Random) -> dict[str, str]:
    """Three different people, and the pronouns of the first."""
    rest = list(PEOPLE)
    (name, they, their), (other, *_), (third, *_) = (rest.pop(_below(rng, len(rest))) for _ in range(3))
    return {"name": name, "other": other, "third": third, "they": they, "They": they.title(), "their": their}


def _number(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    return low + step * _below(rng, (high - low) // step + 1)


def _below(rng: random.Random, n: int) -> int:
    """A whole number in [0, n)."""
    return int(rng.random() * n)


_OPERATORS: Final[dict[str, Callable[[int, int], int]]] = {"+": add, "-": sub, "*": mul, "/": _exact}
SOURCES: Final[dict[str, Callable[..., list[tuple[str, str, str]]]]] = {
    "arithmetic": _arithmetic,
    "gsm8k": _gsm8k,
    "recall": recall,
}
