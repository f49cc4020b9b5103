"""The texts a model is scored on, as plain data with a name, an order and a hash.

A `Sample` is one unit of evidence: a document (scored whole) or a problem (its solution is scored, its question
is only read). A `SampleSet` is a tuple of them in the order in which the gate may look at them: the order of
sha256("seed:id"), so that every prefix is a random subset and nobody can choose a convenient one. The set's own
hash covers every byte of every sample; two results are comparable only when it is equal.

Where the texts come from is the business of `evals.documents` and `evals.problems`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from compress.errors import InputError, Refused
from evals.documents import read_documents
from evals.problems import read_problems

Kind = Literal["documents", "problems"]


@dataclass(frozen=True)
class Sample:
    """One unit: `target` is scored given `context`; a document has the context ""."""

    id: str
    context: str
    target: str


@dataclass(frozen=True)
class SampleSet:
    """Samples in the order of the looks; `sha256` is over the canonical JSON of all of them, in that order.

    `whole` says that the source holds no others.
    """

    name: str
    kind: Kind
    source: str
    sha256: str
    samples: tuple[Sample, ...]
    whole: bool = False


def load_samples(
    name: str,
    *,
    kind: Kind,
    source: str,
    count: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> SampleSet:
    """The first `count` samples (all, if None) of `source` in the order of sha256("seed:id").

    `options` are the keyword arguments of the reader of this kind: `field`, the column of a document's text;
    `columns`, those of a problem's question and answer; `split` ("eval", "calibration") of the generated ones; `words`,
    the least length of documents cut from continuous text, and of the text of "recall".
    Raises InputError for an unknown source and for fewer samples than asked, Refused for none at all.
    """
    if count is not None and count < 1:
        raise InputError(f"count of the sample set {name!r} is {count}, it must be at least 1")
    rows = _READERS[kind](source, count=count, seed=seed, **(options or {}))
    samples = [Sample(*row) for row in rows if row[2].strip()]
    return _ordered(name, kind, source, samples, count=count, seed=seed)


def _documents(source: str, *, count: int | None, seed: int, **options: Any) -> list[tuple[str, str, str]]:
    return [(name, "", text) for name, text in read_documents(source, **options)]


_READERS: Final[dict[Kind, Callable[..., list[tuple[str, str, str]]]]] = {
    "documents": _documents,
    "problems": read_problems,
}


def _ordered(name: str, kind: Kind, source: str, samples: list[Sample], *, count: int | None, seed: int) -> SampleSet:
    if not samples:
        raise Refused(f"the {kind} source {source!r} of {name!r} holds no text, so nothing can be measured on it")
    if len({sample.id for sample in samples}) != len(samples):
        raise InputError(f"the {kind} source {source!r} of {name!r} repeats an id, make its ids unique")
    if count is not None and len(samples) < count:
        raise InputError(
            f"{name!r} asks for {count} {kind} but {source!r} holds only {len(samples)}, lower count or give more"
        )
    chosen = tuple(permuted(samples, seed=seed)[:count])
    digest, whole = samples_digest(chosen), len(chosen) == len(samples)
    return SampleSet(name=name, kind=kind, source=source, sha256=digest, samples=chosen, whole=whole)


def permuted(samples: list[Sample], *, seed: int) -> list[Sample]:
    """The samples in the order of sha256("seed:id"), which no one can steer."""
    return sorted(samples, key=lambda sample: hashlib.sha256(f"{seed}:{sample.id}".encode()).digest())


def samples_digest(samples: tuple[Sample, ...]) -> str:
    """sha256 (hex) of the canonical JSON of the samples: ordered list, sorted keys, no spaces, UTF-8."""
    text = json.dumps([asdict(sample) for sample in samples], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
