"""Calibration texts: a mix of general text, math and chat, so that no skill is left out, and never an evaluation text.

Documents are those of the same source that the evaluation leaves over; generated problems are of their own split; chat
is the problems once more, in the model's own template. Texts are joined into sequences of one length, so that nothing
is padding. No paragraph of a document occurs in anything that is evaluated, wherever that was cut; a problem that is
evaluated too is refused.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import InputError, Refused
from evals.samples import Sample, SampleSet, load_samples

__all__ = ["Text", "calibration_texts", "calibration_tokens", "training_texts"]

PROBLEMS = 256  # of a generator, which has no end
TRAINING_PROBLEMS = 4096  # the same, to learn from


@dataclass(frozen=True)
class Text:
    """`given` is only read, `learnt` is what training learns; of a chat the answer, of anything else the whole."""

    given: str
    learnt: str


def calibration_tokens(
    directory: Path,
    *,
    documents: str | None,
    problems: str | None,
    size: tuple[int, int],
    evaluated: Sequence[SampleSet],
    trust_remote_code: bool = False,
) -> Tensor:
    """(N, T) int64 token ids for the model in `directory`.

    Args:
        documents, problems: sources as in a recipe's evals; None leaves the kind out.
        size: N sequences of T tokens; fewer where the texts end.
        evaluated: the sets that must not be seen.
        trust_remote_code: run Python code that the tokenizer brings.

    Raises:
        InputError: no texts, or too few for one sequence.
        Refused: a text that is also evaluated.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    texts = calibration_texts(documents, problems, evaluated, tokenizer)
    count, length = size
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *ends]
        if len(ids) >= count * length:
            break
    rows = min(count, len(ids) // length)
    if not rows:
        raise InputError(
            f"the calibration texts hold {len(ids)} tokens, fewer than one sequence of {length}: give more"
        )
    return torch.tensor(ids[: rows * length]).reshape(rows, length)


def calibration_texts(
    documents: str | None, problems: str | None, evaluated: Sequence[SampleSet], tokenizer: Any = None
) -> Iterator[str]:
    """The texts, the kinds in turn; chat where a tokenizer with a template is given.

    Raises:
        InputError: no source at all, or an unknown one.
        Refused: a text that is also evaluated.
    """
    kinds: list[Iterable[Text]] = []
    if documents:
        kinds.append(_documents(documents, evaluated))
    if problems:
        kinds += _problems(problems, PROBLEMS, evaluated, tokenizer)
    texts = (text.given + text.learnt for text in _in_turn(kinds))
    first = next(texts, None)
    if first is None:
        raise InputError("no calibration text is left: name documents or problems that the evaluation does not use up")
    return itertools.chain([first], texts)


def training_texts(
    documents: Sequence[str], problems: Sequence[str], evaluated: Sequence[SampleSet], tokenizer: Any
) -> dict[str, list[Text]]:
    """The texts to learn from, by source, in an order that nobody can steer.

    Raises:
        InputError: an unknown source.
        Refused: a text that is also evaluated.
    """
    found = {source: _documents(source, evaluated) for source in documents}
    for source in problems:
        found[source] = list(_in_turn(_problems(source, TRAINING_PROBLEMS, evaluated, tokenizer)))
    return found


def _documents(source: str, evaluated: Sequence[SampleSet]) -> list[Text]:
    samples = [sample for found in evaluated for sample in found.samples]
    read = {paragraph for sample in samples for paragraph in _paragraphs(f"{sample.context}\n\n{sample.target}")}
    found = load_samples("calibration", kind="documents", source=source).samples
    return [Text("", sample.target) for sample in found if read.isdisjoint(_paragraphs(sample.target))]


def _problems(source: str, most: int, evaluated: Sequence[SampleSet], tokenizer: Any) -> list[Iterable[Text]]:
    generated = source == "arithmetic"
    options = {"split": "calibration"} if generated else {}
    count = most if generated else None
    found = load_samples("calibration", kind="problems", source=source, count=count, options=options).samples
    seen = {_digest(sample) for other in evaluated for sample in other.samples}
    both = [sample for sample in found if _digest(sample) in seen]
    if both:
        raise Refused(
            f"{len(both)} calibration problems of {source!r} are evaluated too, first {both[0].id!r}: separate them"
        )
    plain = [Text("", sample.context + sample.target) for sample in found]
    if tokenizer is None or not tokenizer.chat_template:
        return [plain]
    half = len(found) // 2
    return [plain[:half], (_chat(sample, tokenizer) for sample in found[half:])]  # templates are slow: only those asked


def _chat(sample: Sample, tokenizer: Any) -> Text:
    question = sample.context.removeprefix("Question: ").removesuffix("\nAnswer:")
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": sample.target.strip()}]
    whole = str(tokenizer.apply_chat_template(turns, tokenize=False))
    given = str(tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True))
    # A template that rewrites earlier turns (some drop the reasoning) has no such prefix: then all of it is learnt.
    return Text(given, whole.removeprefix(given)) if whole.startswith(given) else Text("", whole)


def _digest(sample: Sample) -> str:
    return hashlib.sha256((sample.context + "\0" + sample.target).encode("utf-8", "surrogatepass")).hexdigest()


def _paragraphs(text: str) -> set[str]:
    """Its paragraphs, whatever their line breaks."""
    return {" ".join(paragraph.split()) for paragraph in text.split("\n\n")} - {""}


def _in_turn(kinds: Sequence[Iterable[Text]]) -> Iterator[Text]:
    for each in itertools.zip_longest(*kinds):
        yield from filter(None, each)
