"""How much a draft speeds up its target: what it guesses right, what that is worth by the formula, what it takes here.

For text that the target has written greedily, a draft's guess is accepted where its likeliest token is the target's,
and up to the first wrong guess draft and target have read the same tokens: so one pass of each over the finished text
shows exactly which drafts would have been accepted, for any number of guesses g per round. With α the chance that a
sampled guess is accepted, Σ min(p, q) (Leviathan et al., arXiv:2211.17192, section 3.1), a round yields
(1 − α^(g+1)) / (1 − α) tokens (eq. 1) and the speed-up is that over 1 + g c, with c the cost of a draft's token in
tokens of the target (theorem 3.8, where checking g + 1 tokens costs what one does).
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.head import final_states, read_head

__all__ = ["Accepted", "agreement", "expected_speedup", "simulate", "speculate", "tokens_per_round"]

MOST = 16  # guesses per round that are tried


@dataclass(frozen=True)
class Accepted:
    """guesses per round, rate: accepted of all guesses, length: tokens per round, the target's own one included."""

    guesses: int
    rate: float
    length: float


def tokens_per_round(alpha: float, guesses: int) -> float:
    """Expected tokens of one pass of the target."""
    return guesses + 1.0 if alpha == 1 else (1 - alpha ** (guesses + 1)) / (1 - alpha)


def expected_speedup(length: float, guesses: int, cost: float) -> float:
    """Of rounds that yield `length` tokens, where a guess costs `cost` passes of the target."""
    return length / (1 + guesses * cost)


def simulate(matches: Sequence[Sequence[bool]], guesses: int) -> Accepted:
    """Rounds over texts of which it is known, token by token, whether the draft would have guessed right."""
    rounds = accepted = drafted = 0
    for text in matches:
        at = 0
        while at < len(text):
            tried = min(guesses, len(text) - at)
            right = next((i for i in range(tried) if not text[at + i]), tried)
            rounds, accepted, drafted = rounds + 1, accepted + right, drafted + tried
            at += right + 1
    return Accepted(guesses, accepted / drafted, 1 + accepted / rounds)


@torch.inference_mode()
def agreement(target: PreTrainedModel, draft: PreTrainedModel, ids: Tensor, given: int) -> tuple[float, Tensor]:
    """α over the tokens after the first `given` of ids (N, T), and where both likeliest tokens agree (N, T - given)."""
    heads = read_head(target), read_head(draft)
    shares, agree = [], []
    for row in ids:
        states = [final_states(model, row[None].to(model.device))[0, given - 1 : -1] for model in (target, draft)]
        p, q = (head.logits(found).softmax(-1).cpu() for head, found in zip(heads, states, strict=True))
        shares.append(torch.minimum(p, q).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    return float(torch.stack(shares).double().mean()), torch.stack(agree)


def speculate(target: PreTrainedModel, draft: PreTrainedModel, prompts: Tensor, new_tokens: int) -> dict[str, Any]:
    """Everything about a draft on prompts (N, T), as plain data; the draft's generation_config gets the best g.

    The measured speed-up is of transformers' assisted generation, greedy, one prompt at a time, after a warm-up.
    """
    logging.getLogger("transformers.generation.utils").setLevel(logging.ERROR)  # it warns of its own calls to itself
    texts, target_seconds = _write(target, prompts, new_tokens)
    _, draft_seconds = _write(draft, prompts, new_tokens)
    cost = draft_seconds / target_seconds
    alpha, matches = agreement(target, draft, texts, prompts.shape[1])
    tried = [simulate(matches.tolist(), guesses) for guesses in range(1, MOST + 1)]
    best = max(tried, key=lambda found: expected_speedup(found.length, found.guesses, cost))
    settings = draft.generation_config
    assert settings is not None
    settings.num_assistant_tokens = best.guesses
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0  # always g guesses, as counted here
    _, assisted_seconds = _write(target, prompts, new_tokens, assistant_model=draft)
    return {
        "prompts": len(prompts),
        "tokens": int(matches.numel()),
        "alpha": alpha,
        "guesses": best.guesses,
        "acceptance_rate": best.rate,
        "acceptance_length": best.length,
        "cost": cost,
        "expected_speedup": expected_speedup(best.length, best.guesses, cost),
        "formula_speedup": expected_speedup(tokens_per_round(alpha, best.guesses), best.guesses, cost),
        "measured_speedup": target_seconds / assisted_seconds,
    }


@torch.inference_mode()
def _write(model: PreTrainedModel, prompts: Tensor, new_tokens: int, **options: Any) -> tuple[Tensor, float]:
    """Greedy continuations with their prompts (N, T + new_tokens) on the CPU, and the seconds they took."""
    settings = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "use_cache": True}
    started = 0.0
    found = []
    for place, prompt in enumerate([prompts[0], *prompts]):
        if place == 1:  # the first is the warm-up
            started = time.perf_counter()
        ids = prompt[None].to(model.device)
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **options)  # type: ignore[operator]
        found.append(written[0].cpu())
    return torch.stack(found[1:]), time.perf_counter() - started
