"""Rows of tokens to learn from, and rows that are never learnt from.

Texts are joined into rows of one length, so that nothing is padding; the mask says which tokens are learnt: all of a
document, of a chat only the answer. A row holds texts of one source only, so that sources can be mixed by rows. The
rows held out come from the first texts and the rest of the text that fills them is dropped: no text is on both sides.
Tokens see the texts before them in their row, as the teacher does.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import InputError
from distill.losses import TopK
from distill.schedule import mixed_order

__all__ = ["Data", "Rows", "Source", "TokenText", "build_data", "pack"]


@dataclass(frozen=True)
class TokenText:
    """Token ids of which the first `given` are only read."""

    ids: list[int]
    given: int = 0


@dataclass(frozen=True)
class Source:
    """The texts of one source, read as far as they are needed, and the share of the rows that they get."""

    name: str
    weight: float
    texts: Iterable[TokenText]


@dataclass(frozen=True)
class Rows:
    """ids (N, T) int64; learnt (N, T) bool, whether the token at a place is predicted. The first of a row never is.

    top  (N, T, …) what a teacher said beforehand about the token after each place
    """

    ids: Tensor
    learnt: Tensor
    top: TopK | None = None

    def __getitem__(self, places: Tensor) -> "Rows":
        return Rows(self.ids[places], self.learnt[places], None if self.top is None else self.top[places])

    def to(self, device: torch.device) -> "Rows":
        """The same on a device."""
        top = None if self.top is None else self.top.to(device)
        return Rows(self.ids.to(device), self.learnt.to(device), top)

    @property
    def tokens(self) -> int:
        """How many tokens are predicted."""
        return int(self.learnt[:, 1:].sum())


@dataclass(frozen=True)
class Data:
    """`order` (steps × batch,) are places in `train`, in the order they are read."""

    train: Rows
    order: Tensor
    held_out: Rows


def pack(texts: Iterator[TokenText], length: int, rows: int) -> Rows:
    """Fill at most `rows` with whole texts and cut what is over; no text is begun that is not needed."""
    ids: list[int] = []
    learnt: list[bool] = []
    while len(ids) < rows * length:
        text = next(texts, None)
        if text is None:
            break
        ids += text.ids
        learnt += [place >= text.given for place in range(len(text.ids))]
    count = min(rows, len(ids) // length)
    shape, end = (count, length), count * length
    return Rows(torch.tensor(ids[:end]).long().reshape(shape), torch.tensor(learnt[:end]).bool().reshape(shape))


def build_data(sources: Sequence[Source], *, length: int, held_out: int, total: int, seed: int) -> Data:
    """Rows of `length` tokens from every source: about `held_out` apart, and an order of `total` to learn from.

    Raises:
        InputError: a source with too little text for a row on each side, or nothing to learn in it.
    """
    shares = [source.weight / sum(other.weight for other in sources) for source in sources]
    train, apart = [], []
    for source, share in zip(sources, shares, strict=True):
        texts = iter(source.texts)
        apart.append(_some(source, pack(texts, length, max(1, round(share * held_out)))))
        train.append(_some(source, pack(texts, length, math.ceil(share * total) + 1)))
    order = mixed_order([len(rows.ids) for rows in train], shares, total, seed)
    return Data(_joined(train), order, _joined(apart))


def _some(source: Source, rows: Rows) -> Rows:
    if not rows.tokens:
        raise InputError(
            f"{source.name!r} has too little text for rows of {rows.ids.shape[1]} tokens to learn from and others held "
            "out: give more text or a lower training.length or held_out"
        )
    return rows


def _joined(parts: Iterable[Rows]) -> Rows:
    parts = list(parts)
    return Rows(torch.cat([part.ids for part in parts]), torch.cat([part.learnt for part in parts]))
