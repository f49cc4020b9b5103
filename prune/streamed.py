"""A model that is run with one block in memory at a time, and how far apart two of them are on the same tokens."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.errors import CheckpointError, Refused
from compress.tensor_file import read_tensor
from compress.walk_model import Skeleton, run_block

__all__ = ["Streamed", "divergence"]

FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "ln_f")
CHUNK = 256  # positions whose logits exist at once


class Streamed:
    """A model on tokens (N, T) int64: `start` (N, T, D) enters the first block, `head` is (V, D).

    Raises:
        CheckpointError: the final norm or the head is not found.
    """

    def __init__(self, skeleton: Skeleton, tokens: Tensor, device: torch.device) -> None:
        self.skeleton = skeleton
        self.device = device
        with torch.no_grad():
            recorded = [*self.skeleton.record(tokens, torch.float32, device)]
        self.start = torch.cat([states for states, _ in recorded])
        self.calls = recorded[0][1]
        self.norm, self.head = _tail(self.skeleton, device)

    def block(self, layer: int) -> Callable[[Tensor], Tensor]:
        """A function of hidden states; the weights are let go with it."""
        module = self.skeleton.load(layer, torch.float32, self.device, floor=0)
        return partial(run_block, module, self.calls[layer])

    @torch.no_grad()
    def final(self, removed: Collection[int] = ()) -> Tensor:
        """(N, T, D) what enters the head, without some of the layers."""
        hidden = self.start
        for layer in range(len(self.skeleton.blocks)):
            if layer not in removed:
                hidden = self.block(layer)(hidden)
        normed: Tensor = self.norm(hidden)
        return normed


@torch.no_grad()
def divergence(source: tuple[Tensor, Tensor], others: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """KL(source ‖ other) in nats per token of each other one, all given as final states (N, T, D) and head (V, D).

    Raises:
        Refused: one is not finite.
    """
    parts = [torch.split(states.flatten(0, 1), CHUNK) for states, _ in (source, *others)]
    heads = [head for _, head in (source, *others)]
    totals = [0.0] * len(others)
    for chunk in zip(*parts, strict=True):
        logs = (F.log_softmax(part @ head.t(), dim=-1) for part, head in zip(chunk, heads, strict=True))
        p = next(logs)
        for at, q in enumerate(logs):  # one at a time: a chunk's logits are as large as the vocabulary
            totals[at] += float(F.kl_div(q, p, log_target=True, reduction="sum"))
    if not all(total < torch.inf for total in totals):
        raise Refused("the divergence of a pruned model from its source is NaN or infinite: check the source model")
    return [total / source[0].shape[:2].numel() for total in totals]


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
