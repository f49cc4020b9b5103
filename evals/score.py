"""Exact scores of a causal language model on samples: NLL, top-1, and KL from the source.

The time goes into matrix products, so nothing is multiplied that is not needed: windows of like length share a batch
(hardly any padding), the output head sees only the scored positions (not the questions), and its logits exist for a few
hundred tokens at a time, in float32. The final hidden states of the source can be kept; with them and its output head
the variant's run gives the exact divergence KL(source || variant) and the top-1 agreement on the same tokens, and the
source runs once for any number of variants.

Sums over a sample are float64. Anything not finite refuses the whole evaluation: a mean over the rest would look fine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import Refused
from compress.head import Head, KvCache, final_states, read_head
from evals.windows import Encoded, Window

__all__ = ["Reading", "Reference", "Row", "Scores", "aa_difference", "score"]

LOGITS: Final = 2**24  # float32 logits held at once (64 MiB)
MEASURES: Final = ("nll", "top1", "kl", "agree")  # of each scored token; the last two need a reference

Row = dict[str, Any]


@dataclass(frozen=True)
class Reading:
    """How a model reads its tokens.

    batch_tokens  rows times the longest row of a batch, at most
    make_cache    the tokens of each row -> an empty KV cache, where the checkpoint asks for one that is not exact
    """

    batch_tokens: int = 4096
    make_cache: Callable[[Sequence[int]], KvCache] | None = None


EXACT: Final = Reading()


@dataclass(frozen=True)
class Reference:
    """The source's final hidden states (scored tokens of all samples in order, hidden), its head, and the hashes."""

    states: Tensor
    head: Head
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class Scores:
    """One row per sample in the order given; `states` (scored tokens, hidden) on the CPU if they were asked for.

    A row: id, hash, tokens, bytes, nll (nats, summed), top1 (tokens whose argmax is right), and with a reference kl
    (nats, summed) and agree (tokens whose argmax is the source's).
    """

    rows: list[Row]
    states: Tensor | None = None


@dataclass(frozen=True)
class _Place:
    """A window, the sample it is of, and the place of its first scored token among those of all samples."""

    sample: str
    start: int
    window: Window


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    encoded: Sequence[Encoded],
    *,
    reading: Reading = EXACT,
    reference: Reference | None = None,
    keep_states: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Scores:
    """Score every sample; `advance` is told the tokens read after each batch.

    Raises Refused for logits that are not finite, for a reference about other samples or another vocabulary, and for a
    model whose logits do not follow from its hidden states.
    """
    head = read_head(model)
    _check_reference(reference, head, encoded)
    measures = torch.zeros(sum(sample.tokens for sample in encoded), len(MEASURES), dtype=torch.float64)
    kept = torch.empty(0)
    for batch in _batches(list(_places(encoded)), reading.batch_tokens):
        states, targets = _read(model, [place.window for place in batch], reading)
        at = torch.cat([torch.arange(place.start, place.start + place.window.scored) for place in batch])
        source = (reference.states[at], reference.head) if reference else None
        measures[at] = _measure(head, states, targets, source)
        _check_finite(batch, measures)
        if keep_states:
            kept = kept if len(kept) else states.new_empty(len(measures), states.shape[-1], device="cpu")
            kept[at] = states.cpu()
        advance(sum(len(place.window.ids) - 1 for place in batch))
    return Scores(_rows(encoded, measures, reference), kept if keep_states else None)


def aa_difference(
    model: PreTrainedModel, encoded: Sequence[Encoded], rows: Sequence[Row], *, count: int, reading: Reading
) -> float:
    """Score the first `count` samples once more; the largest |difference to `rows`| in nats per token of a sample."""
    again = score(model, encoded[:count], reading=reading).rows
    pairs = zip(again, rows, strict=False)
    return float(max(abs(new["nll"] - old["nll"]) / new["tokens"] for new, old in pairs))


def _check_reference(reference: Reference | None, head: Head, encoded: Sequence[Encoded]) -> None:
    if reference is None:
        return
    if reference.head.vocabulary != head.vocabulary:
        raise Refused(
            f"the vocabulary has {head.vocabulary} tokens but that of the source has {reference.head.vocabulary}, "
            "so there is no divergence between them"
        )
    if reference.hashes != tuple(sample.hash for sample in encoded):
        raise Refused("the source's hidden states are about other samples or other tokens, score the source again")


def _places(encoded: Sequence[Encoded]) -> Iterator[_Place]:
    windows = [(sample.id, window) for sample in encoded for window in sample.windows]
    starts = accumulate((window.scored for _, window in windows), initial=0)
    for (name, window), start in zip(windows, starts, strict=False):
        yield _Place(name, start, window)


def _batches(places: list[_Place], batch_tokens: int) -> Iterator[list[_Place]]:
    """Longest first, as many as fit: rows times the longest at most `batch_tokens`, but at least one."""
    waiting = sorted(places, key=lambda place: -len(place.window.ids))
    while waiting:
        rows = max(1, batch_tokens // (len(waiting[0].window.ids) - 1))
        yield waiting[:rows]
        waiting = waiting[rows:]


def _read(model: PreTrainedModel, windows: list[Window], reading: Reading) -> tuple[Tensor, Tensor]:
    """Final hidden states (T, hidden) and the ids to predict (T,) of the scored positions of all windows."""
    longest = max(len(window.ids) for window in windows) - 1
    # Any id pads: a causal model does not see what is to the right, and no padded position is selected.
    rows = [[*window.ids[:-1], *[0] * (longest - len(window.ids) + 1)] for window in windows]
    cache = reading.make_cache and reading.make_cache([len(window.ids) - 1 for window in windows])
    states = final_states(model, torch.tensor(rows, device=model.device), cache).flatten(0, 1)
    ends = [row * longest + len(window.ids) - 1 for row, window in enumerate(windows)]
    spans = [torch.arange(end - window.scored, end) for end, window in zip(ends, windows, strict=True)]
    targets = [token for window in windows for token in window.ids[-window.scored :]]
    return states[torch.cat(spans).to(states.device)], torch.tensor(targets, device=states.device)


def _measure(head: Head, states: Tensor, targets: Tensor, source: tuple[Tensor, Head] | None) -> Tensor:
    """The measures (T, 4), float64 on the CPU, of the tokens `targets` (T,) given the states (T, hidden)."""
    rows = max(1, LOGITS // head.vocabulary)
    parts = []
    for start in range(0, len(states), rows):
        span = slice(start, start + rows)
        log_q = head.logits(states[span]).log_softmax(-1)
        columns = [*_nll(log_q, targets[span])]
        if source:
            log_p = source[1].logits(source[0][span].to(states.device)).log_softmax(-1)
            columns += _divergence(log_p, log_q)
        parts.append(torch.stack([column.double().cpu() for column in columns], dim=-1))
    found = torch.cat(parts)
    return torch.nn.functional.pad(found, (0, len(MEASURES) - found.shape[-1]))


def _nll(log_q: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log q(target) and whether the target is the argmax, for log-probabilities (T, V) and targets (T,)."""
    return -log_q.gather(-1, targets[:, None])[:, 0], log_q.argmax(-1) == targets


def _divergence(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) in nats and whether both argmaxes agree, for log-probabilities (T, V)."""
    return (log_p.exp() * (log_p - log_q)).sum(-1), log_p.argmax(-1) == log_q.argmax(-1)


def _check_finite(batch: list[_Place], measures: Tensor) -> None:
    for place in batch:
        if not measures[place.start : place.start + place.window.scored].isfinite().all():
            raise Refused(
                f"sample {place.sample!r} has a loss that is not finite: weights or activations hold NaN or infinity"
            )


def _rows(encoded: Sequence[Encoded], measures: Tensor, reference: Reference | None) -> list[Row]:
    sums = [part.sum(0).tolist() for part in torch.split(measures, [sample.tokens for sample in encoded])]
    return [_row(sample, found, reference is not None) for sample, found in zip(encoded, sums, strict=True)]


def _row(sample: Encoded, values: list[float], compared: bool) -> Row:
    nll, top1, kl, agree = values
    row = {"id": sample.id, "hash": sample.hash, "tokens": sample.tokens, "bytes": sample.size}
    row |= {"nll": nll, "top1": int(top1)}
    return row | {"kl": kl, "agree": int(agree)} if compared else row
