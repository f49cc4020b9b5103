"""From final hidden states to logits, apart from the rest of the model.

A causal language model ends in its output embedding and, in some families, a scaling or a soft cap of the logits. With
this part apart, logits are only computed where they are scored, a few rows at a time, and the hidden states of the
source can be kept (a few kilobytes per token) where its logits could not (hundreds).

What a family does to its logits is a table of configuration fields. Since a table can be out of date, `read_head`
compares the result with the model's own logits on a short input and refuses a model for which they differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import Refused

__all__ = ["Head", "KvCache", "final_states", "load_head", "read_head", "save_head"]

PROBE: Final = 12  # tokens of the input on which the parts are compared with the whole
TOLERANCE: Final = 16  # in units of the dtype's epsilon times the largest logit; a missing factor is far above


def _multiply(logits: Tensor, value: float) -> Tensor:
    return logits * value


def _divide(logits: Tensor, value: float) -> Tensor:
    return logits / value


def _cap(logits: Tensor, value: float) -> Tensor:
    """value · tanh(logits / value), Gemma 2 section 2 (arXiv:2408.00118)."""
    return torch.tanh(logits / value) * value


TRANSFORMS: Final[dict[str, Callable[[Tensor, float], Tensor]]] = {
    "logit_scale": _multiply,  # Cohere
    "logits_scaling": _divide,  # Granite
    "lm_head_multiplier": _multiply,  # Falcon-H1
    "final_logit_softcapping": _cap,  # Gemma 2 and later
    "logits_soft_cap": _cap,  # RecurrentGemma
}


@dataclass(frozen=True)
class Head:
    """`project` is the output embedding (tokens, hidden) -> (tokens, vocabulary); `transforms` follow it in order."""

    project: Callable[[Tensor], Tensor]
    transforms: tuple[tuple[str, float], ...]
    vocabulary: int

    def logits(self, states: Tensor) -> Tensor:
        """Logits (tokens, vocabulary), float32, computed in the dtype of the states as the model does."""
        logits = self.project(states)
        for name, value in self.transforms:
            logits = TRANSFORMS[name](logits, value)
        return logits.float()


class KvCache(Protocol):
    """transformers' cache of keys and values, one that may want no more than `chunk` tokens at a time."""

    chunk: int | None


def final_states(model: PreTrainedModel, ids: Tensor, cache: KvCache | None = None) -> Tensor:
    """Hidden states (batch, length, hidden) that enter the output embedding, for ids (batch, length).

    Keys and values pass through `cache`, if there is one, in as many passes as it wants. Without an attention mask:
    padding on the right cannot be seen by a causal model, and its states are not read.
    """
    if cache is None:
        return _states(model, ids, use_cache=False)
    parts = torch.split(ids, cache.chunk or ids.shape[1], dim=1)
    return torch.cat([_states(model, part, use_cache=True, cache=cache) for part in parts], dim=1)


def _states(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    states = model.base_model(input_ids=ids, **options).last_hidden_state
    assert isinstance(states, Tensor)
    return states


def read_head(model: PreTrainedModel) -> Head:
    """The output head of a loaded model; Refused if head and hidden states do not give the model's own logits."""
    project: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    name = type(model).__name__
    if project is None or model.base_model is model:
        raise Refused(f"{name} has no output embedding after a decoder, so it cannot be scored as a causal model")
    probe = _probe(model)
    with torch.inference_mode():
        whole = model(input_ids=probe, use_cache=False).logits.float()
        states = final_states(model, probe)
    head = Head(project, _transforms(model.config.get_text_config()), whole.shape[-1])
    if not _agree(head, states, whole):
        raise Refused(
            f"the logits of {name} do not follow from its final hidden states and output embedding as known here, "
            f"known transforms are {', '.join(TRANSFORMS)}"
        )
    return head


def _probe(model: PreTrainedModel) -> Tensor:
    """Ids (1, PROBE) spread over the vocabulary."""
    size = int(model.config.get_text_config().vocab_size)
    return (torch.arange(PROBE, device=model.device)[None] * 7919 + 11) % size


def _transforms(config: Any) -> tuple[tuple[str, float], ...]:
    found = ((name, getattr(config, name, None)) for name in TRANSFORMS)
    return tuple((name, float(value)) for name, value in found if value is not None)


@torch.inference_mode()
def _agree(head: Head, states: Tensor, whole: Tensor) -> bool:
    """Whether head(states) is `whole` up to rounding; a model whose logits are not finite is found out when scored."""
    logits = head.logits(states)
    bound = TOLERANCE * torch.finfo(states.dtype).eps * whole.abs().max()
    return logits.shape == whole.shape and not bool(((logits - whole).abs().max() > bound).item())


def save_head(head: Head, path: Path) -> None:
    """Write a head whose output embedding is a plain linear layer; Refused for any other."""
    if not isinstance(head.project, nn.Linear):
        raise Refused(
            f"the output embedding is a {type(head.project).__name__}, only a plain Linear can be kept for comparison"
        )
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.project.named_parameters()}
    metadata = {name: repr(value) for name, value in head.transforms}
    save_file(tensors, path, metadata=metadata)


def load_head(path: Path, *, device: torch.device) -> Head:
    """Read what `save_head` wrote."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        metadata = file.metadata() or {}
    project = partial(nn.functional.linear, weight=tensors["weight"], bias=tensors.get("bias"))
    transforms = tuple((name, float(metadata[name])) for name in TRANSFORMS if name in metadata)
    return Head(project, transforms, tensors["weight"].shape[0])
