"""A small sibling of a model, cut out of it: fewer layers, and if wanted a narrower feed-forward part.

Layers are taken evenly from first to last; of the feed-forward channels those with the largest product of norms
‖gate‖ ‖up‖ ‖down‖. What comes out knows little until it is distilled. Vocabulary and tokenizer stay the target's, which
engines require of a draft. Architecture by structure: decoder layers are what lies under `layers.N.` in the weights.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import RecipeError

__all__ = ["build_draft", "kept_layers"]

LAYER: Final = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
GATED: Final = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}  # projection -> the axis of its weight that is cut
PER_LAYER: Final = ("layer_types",)  # lists in a configuration with an entry for each layer


def kept_layers(present: int, wanted: int) -> list[int]:
    """Which layers are kept, evenly from the first to the last.

    Raises:
        RecipeError: more than there are.
    """
    if not 0 < wanted <= present:
        raise RecipeError(f"draft.layers is {wanted}, but the target has {present} layers: say fewer")
    return [round(place) for place in torch.linspace(0, present - 1, wanted).tolist()]


def build_draft(target: PreTrainedModel, layers: int, ffn: int | None = None) -> PreTrainedModel:
    """A float32 model with weights of its own on the CPU; the target stays as it is.

    Raises:
        RecipeError: more layers or channels than the target has, or no gated feed-forward part to cut.
    """
    config = copy.deepcopy(target.config)
    kept = kept_layers(config.num_hidden_layers, layers)
    config.num_hidden_layers = layers
    for key in PER_LAYER:
        if getattr(config, key, None):
            setattr(config, key, [getattr(config, key)[layer] for layer in kept])
    state = _renumbered(target.state_dict(), kept)
    if ffn is not None:
        state = _narrowed(state, ffn)
        config.intermediate_size = ffn
    config.dtype = torch.float32
    draft: PreTrainedModel = type(target)(config)
    draft.load_state_dict(state)
    return draft


def _renumbered(state: Mapping[str, Any], kept: list[int]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        layer = LAYER.fullmatch(name)
        if layer is None:
            found[name] = tensor.detach().float().cpu()
        elif int(layer[2]) in kept:
            found[f"{layer[1]}{kept.index(int(layer[2]))}{layer[3]}"] = tensor.detach().float().cpu()
    return found


def _narrowed(state: Mapping[str, Tensor], ffn: int) -> dict[str, Tensor]:
    parts: dict[str, dict[str, str]] = {}  # feed-forward part -> projection -> name of its weight
    for name in state:
        part, _, projection = name.removesuffix(".weight").rpartition(".")
        if projection in GATED:
            parts.setdefault(part, {})[projection] = name
    if not parts or any(set(names) != set(GATED) for names in parts.values()):
        raise RecipeError(
            "draft.ffn needs gate_proj, up_proj and down_proj in every layer: leave it out for this model"
        )
    found = dict(state)
    for names in parts.values():
        width = state[names["up_proj"]].shape[0]
        if ffn > width:
            raise RecipeError(f"draft.ffn is {ffn}, but the target has {width} channels: say fewer")
        norms = [state[name].norm(dim=1 - GATED[projection]) for projection, name in names.items()]
        kept = torch.stack(norms).log().sum(0).topk(ffn).indices.sort().values
        for projection, name in names.items():
            found[name] = state[name].index_select(GATED[projection], kept)
    return found
