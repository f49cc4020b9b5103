"""Which layers stay: removed one after the other, each time the one whose absence changes the output least.

Greedy by KL (as SLEB, arXiv:2402.09025, does by perplexity): every candidate is the model without one more layer, its
damage KL(source || candidate) on calibration tokens. All candidates go through the model together, one block in memory
at a time: the candidate without layer i leaves the common path there, so blocks in front of it are computed once.
After the first round only the layers that looked cheapest are tried again. `cosine` (ShortGPT, arXiv:2403.03853) costs
one pass: 1 - cos between what enters and what leaves a layer, which is known to be blind to what math needs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.errors import CheckpointError, Refused
from compress.tensor_file import read_tensor
from compress.walk_journal import Journal
from compress.walk_model import Skeleton

__all__ = ["SCORES", "choose_layers"]

SCORES = ("kl", "cosine")
TOKENS = 2048  # of calibration that a candidate is judged on
RETRIED = 8  # candidates after the first round, beside those that are still to be removed
FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "ln_f")
CHUNK = 256  # positions whose logits exist at once


def choose_layers(
    source: Skeleton, tokens: Tensor, keep: int, score: str, journal: Journal, device: torch.device
) -> list[int]:
    """The layers that stay, ascending.

    Args:
        tokens: (N, T) int64 calibration tokens, of which the first 2048 are used.
        score: "kl", "cosine" or "random".

    Raises:
        CheckpointError: the blocks, the final norm or the head are not found.
        Refused: a divergence that is not finite.
    """
    saved = journal.load("layers")
    removed: list[int] = saved[1]["removed"] if saved else []
    model = _Model(source, tokens[: max(1, TOKENS // tokens.shape[1])], device)
    total = len(model.skeleton.blocks)
    if score != "kl":
        scores = model.cosines() if score == "cosine" else torch.rand(total, generator=torch.Generator().manual_seed(0))
        return sorted(scores.topk(keep).indices.tolist())
    candidates = [*range(total)]
    while len(removed) < total - keep:
        damage = model.damage(removed, [layer for layer in candidates if layer not in removed])
        order = sorted(damage, key=lambda layer: damage[layer])
        removed = [*removed, order[0]]
        candidates = sorted(order[: RETRIED + total - keep])
        journal.save("layers", {"removed": torch.tensor(removed)}, {"removed": removed, "candidates": candidates})
    return [layer for layer in range(total) if layer not in removed]


class _Model:
    """The source as blocks that are loaded when they are passed."""

    def __init__(self, source: Skeleton, tokens: Tensor, device: torch.device) -> None:
        self.skeleton = source
        self.device = device
        with torch.no_grad():
            recorded = [*self.skeleton.record(tokens, torch.float32, device)]
        self.start = torch.cat([states for states, _ in recorded])  # (N, T, D)
        self.calls = recorded[0][1]
        self.norm, self.head = _tail(self.skeleton, device)
        self.source: Tensor | None = None  # (N * T, D) normed final states of the whole model

    def block(self, layer: int) -> Any:
        """A function of hidden states; the weights are let go with it."""
        module = self.skeleton.load(layer, torch.float32, self.device, floor=0)
        args, kwargs = self.calls[layer]

        def forward(hidden: Tensor) -> Tensor:
            output = module(hidden, *args, **kwargs)
            result: Tensor = output[0] if isinstance(output, tuple) else output
            return result

        return forward

    @torch.no_grad()
    def damage(self, removed: Sequence[int], candidates: Sequence[int]) -> dict[int, float]:
        """KL(source || model without `removed` and one candidate), nats per token, by candidate."""
        if self.source is None:
            self.source = self.norm(self._run(()))
        common = self.start
        streams: dict[int, Tensor] = {}
        for layer in range(len(self.skeleton.blocks)):
            if layer in removed:
                continue
            block = self.block(layer)
            streams = {candidate: block(hidden) for candidate, hidden in streams.items()}
            if layer in candidates:
                streams[layer] = common
            common = block(common)
        return {layer: self._divergence(self.norm(hidden)) for layer, hidden in streams.items()}

    def _run(self, removed: Sequence[int]) -> Tensor:
        hidden = self.start
        for layer in range(len(self.skeleton.blocks)):
            if layer not in removed:
                hidden = self.block(layer)(hidden)
        return hidden

    def _divergence(self, states: Tensor) -> float:
        assert self.source is not None
        pairs = zip(*(torch.split(part.flatten(0, 1), CHUNK) for part in (self.source, states)), strict=True)
        total = 0.0
        for source, candidate in pairs:
            p, q = (F.log_softmax(part @ self.head.t(), dim=-1) for part in (source, candidate))
            total += float(F.kl_div(q, p, log_target=True, reduction="sum"))
        if not total < torch.inf:
            raise Refused("the divergence of a model with a layer less is NaN or infinite: check the source model")
        return total / states.shape[:2].numel()

    @torch.no_grad()
    def cosines(self) -> Tensor:
        """(L,) mean over tokens of 1 - cos(what enters, what leaves) of every layer."""
        found, hidden = [], self.start
        for layer in range(len(self.skeleton.blocks)):
            output = self.block(layer)(hidden)
            found.append(1 - F.cosine_similarity(hidden, output, dim=-1).mean())
            hidden = output
        return torch.stack(found)


def _tail(model: Skeleton, device: torch.device) -> tuple[nn.Module, Tensor]:
    """The final norm and the output embedding (V, D) with their weights."""
    decoder = model.model.get_decoder()
    parent = model.prefix.rpartition(".")[0]
    name = next((name for name in FINAL_NORMS if hasattr(decoder, name)), None)
    head = next((n for n in ("lm_head.weight", f"{parent}.embed_tokens.weight") if n in model.where), None)
    if name is None or head is None:
        raise CheckpointError(f"{type(model.model).__name__} has no final norm or head of a known name: drop no layers")
    norm = getattr(decoder, name)
    for leaf, _ in list(norm.named_parameters()):
        value = read_tensor(model.where[f"{parent}.{name}.{leaf}"]).to(device, torch.float32)
        setattr(norm, leaf, nn.Parameter(value, requires_grad=False))
    return norm, read_tensor(model.where[head]).to(device, torch.float32)
