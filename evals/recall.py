"""Facts in a long text, one of them asked for at the end: can what was read far back still be told apart?

Perplexity and short problems hardly notice a damaged KV cache; finding one of several alike facts thousands of tokens
back does. The negative log-likelihood of the right answer gives a signal for models that would rarely answer right.

Codes of places are planted in text from "python-docs", one at each of `DEPTHS`, and the code of one place is asked for.
A sample's id ends in the depth of the fact it asks for, by which the loss can be looked at. The text is from one half
of the documents, so that the other is left to calibrate with; successive samples go on where the last one stopped.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, cycle
from typing import Final

from evals.documents import read_documents

__all__ = ["DEPTHS", "depth_of", "filler", "recall", "split_of_document"]

DEPTHS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)  # words before the fact, as a fraction of all
WORDS: Final = 1400  # of text around the facts; at least 2,000 tokens for the tokenizers in use
PLACES: Final = (
    "harbor", "library", "museum", "station", "theater", "bakery", "airport", "stadium", "gallery", "hospital",
    "castle", "brewery", "market", "lighthouse", "factory", "academy", "garden", "chapel", "embassy", "warehouse",
)  # fmt: skip


def recall(*, count: int | None, seed: int, split: str, words: int | None = None) -> list[tuple[str, str, str]]:
    """(id, context, target) of `count` samples, 100 by default, with at least `words` words of text each."""
    rng = random.Random(int.from_bytes(hashlib.sha256(f"recall:{split}:{seed}".encode()).digest()))
    paragraphs = cycle(filler(split))
    samples = []
    for i in range(count or 100):
        asked = i % len(DEPTHS)
        facts = _facts(rng)
        context = _plant(
            list(_text(paragraphs, words or WORDS)), [f"The access code of the {p} is {c}." for p, c in facts]
        )
        place, code = facts[asked]
        question = f"Question: What is the access code of the {place}?\nAnswer: The access code of the {place} is"
        samples.append((f"recall/{split}/{i}/{DEPTHS[asked]}", f"{context}\n\n{question}", f" {code}."))
    return samples


def depth_of(sample: str) -> float | None:
    """The depth that the id of a sample states; None for other samples."""
    parts = sample.split("/")
    return float(parts[-1]) if parts[0] == "recall" and len(parts) == 4 else None


def filler(split: str) -> list[str]:
    """Paragraphs of the half of "python-docs" that belongs to a split."""
    documents = [text for name, text in read_documents("python-docs") if split_of_document(name) == split]
    return [paragraph for text in documents for paragraph in text.split("\n\n")]


def split_of_document(name: str) -> str:
    """The split a document belongs to: one bit of the hash of its id."""
    return "eval" if hashlib.sha256(name.encode()).digest()[0] & 1 else "calibration"


def _facts(rng: random.Random) -> list[tuple[str, int]]:
    """A place and its five digits for each depth, all places and codes different."""
    places, facts = list(PLACES), dict[str, int]()
    while len(facts) < len(DEPTHS):
        code = 10_000 + int(rng.random() * 90_000)
        if code not in facts.values():
            facts[places.pop(int(rng.random() * len(places)))] = code
    return list(facts.items())


def _text(paragraphs: Iterator[str], words: int) -> Iterator[str]:
    """Paragraphs until there are enough words."""
    total = 0
    while total < words:
        paragraph = next(paragraphs)
        total += len(paragraph.split())
        yield paragraph


def _plant(paragraphs: list[str], facts: list[str]) -> str:
    """The text with each fact as a paragraph of its own, before the first that begins at its depth or later."""
    begins = [0, *accumulate(len(paragraph.split()) for paragraph in paragraphs)]
    for depth, fact in reversed([*zip(DEPTHS, facts, strict=True)]):
        paragraphs.insert(bisect_left(begins, depth * begins[-1]), fact)
    return "\n\n".join(paragraphs)
