"""Texts become windows of token ids, by the rules of lm-eval, so that its published figures can be compared.

A document is cut into disjoint windows of `max_length` tokens (`loglikelihood_rolling`): the first begins with the
prefix token, which is never scored; each later one begins with the token before it; the last, usually shorter, is
filled up on the left with tokens that are only read. Every token is scored exactly once.

A problem is its context and its target encoded together; the tokens after those of the context alone are scored
(`loglikelihood`). Spaces at the end of the context belong to the target. A problem that does not fit is refused, never
cut: with half a question the score would be about something else.

Special tokens: a document's text has none but the prefix. A problem begins with the BOS where the tokenizer puts one
(`add_bos=None`), always (True) or never (False). lm-eval puts the tokenizer's own BOS after the prefix of a document
and scores it; here this double BOS is left out, which is its `add_bos_token=False`.
"""

import hashlib
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from compress.errors import InputError, Refused
from evals.samples import Sample, SampleSet

__all__ = ["Encoded", "Window", "encode", "prefix_token", "total_tokens"]


@dataclass(frozen=True)
class Window:
    """Token ids of which the last `scored` are predicted from all those before them."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Encoded:
    """A sample as windows; `hash` covers every id and which of them are scored, `size` is the scored text in bytes."""

    id: str
    hash: str
    size: int
    windows: tuple[Window, ...]

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return sum(window.scored for window in self.windows)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    samples: SampleSet,
    *,
    max_length: int,
    max_tokens: int | None = None,
    add_bos: bool | None = None,
) -> list[Encoded]:
    """Each sample as windows of at most `max_length` inputs; documents are cut to their first `max_tokens` tokens.

    Raises Refused for a sample without tokens to score and for a problem longer than `max_length`.
    """
    if max_length < 2:
        raise InputError(f"max_length is {max_length}, a window needs at least 2 tokens")
    prefix = prefix_token(tokenizer)
    if samples.kind == "documents":
        return [_document(tokenizer, sample, prefix, max_length, max_tokens) for sample in samples.samples]
    bos = _begins_with_bos(tokenizer, add_bos)
    starts = [(prefix,) if bos or not sample.context.strip() else () for sample in samples.samples]
    pairs = zip(samples.samples, starts, strict=True)
    return [_problem(tokenizer, sample, start, max_length) for sample, start in pairs]


def total_tokens(encoded: list[Encoded]) -> int:
    """Tokens the model will read, which is what progress is counted in."""
    return sum(len(window.ids) - 1 for sample in encoded for window in sample.windows)


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that stands before the first one: BOS, or else EOS. InputError if there is neither."""
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if not isinstance(found, int):
        raise InputError("the tokenizer has neither a BOS nor an EOS token, so a first token cannot be scored")
    return found


def _begins_with_bos(tokenizer: PreTrainedTokenizerBase, add_bos: bool | None) -> bool:
    if add_bos is not None:
        return add_bos
    ids = tokenizer.encode("a")
    return len(ids) > 1 and ids[0] == tokenizer.bos_token_id


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Without `verbose=False` a text longer than the model's context prints a warning, though it will be cut.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _document(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, prefix: int, max_length: int, max_tokens: int | None
) -> Encoded:
    ids = _ids(tokenizer, sample.target)
    cut = ids[:max_tokens]
    text = sample.target if len(cut) == len(ids) else str(tokenizer.decode(cut))
    return _encoded(sample, text, tuple(_rolling((prefix, *cut), max_length)))


def _rolling(ids: tuple[int, ...], max_length: int) -> list[Window]:
    """Disjoint windows over ids[1:]; ids[0] is the prefix. Window k scores (k·max_length, (k+1)·max_length]."""
    last = len(ids) - 1
    spans = [(start, min(start + max_length, last)) for start in range(0, last, max_length)]
    # A window reads max_length ids and predicts one more, so only the first reaches back to the prefix.
    return [Window(ids[max(stop - max_length, 0) : stop + 1], stop - start) for start, stop in spans]


def _problem(tokenizer: PreTrainedTokenizerBase, sample: Sample, start: tuple[int, ...], max_length: int) -> Encoded:
    read = (*start, *_ids(tokenizer, sample.context.rstrip()))
    whole = (*start, *_ids(tokenizer, sample.context + sample.target))
    if len(whole) - 1 > max_length:
        raise Refused(
            f"problem {sample.id!r} has {len(whole) - 1} tokens but max_length is {max_length}, "
            "raise it or leave the problem out"
        )
    return _encoded(sample, sample.target, (Window(whole, len(whole) - len(read)),))


def _encoded(sample: Sample, text: str, windows: tuple[Window, ...]) -> Encoded:
    if not windows or min(window.scored for window in windows) < 1:
        raise Refused(f"sample {sample.id!r} has no tokens to score")
    canonical = ";".join(f"{window.scored}:{','.join(map(str, window.ids))}" for window in windows)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return Encoded(id=sample.id, hash=digest, size=len(text.encode("utf-8", "surrogatepass")), windows=windows)
