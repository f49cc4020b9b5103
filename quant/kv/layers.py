"""Which layers of a checkpoint keep keys and values, read off its headers and configuration; no model is built.

A layer has a cache of its own where it projects to keys. Layers that reuse another's, and layers of recurrent or linear
attention, have none. Multi-head latent attention keeps a compressed latent in place of keys and values, which engines
quantize in a way of their own, and is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from compress.architectures import layer_of
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.modules import class_of
from quant.kv.schemes import KvScheme

__all__ = ["Attention", "attention_layers", "misfit"]

# the projection to keys, alone or with others, in packed formats too
KEY_PROJECTION = re.compile(
    r"(?P<attention>.+)\.(?P<projection>k_proj|qkv_proj|query_key_value|c_attn|Wqkv)\.weight(_packed)?$"
)


@dataclass(frozen=True)
class Attention:
    """A layer's attention module, and the shape of what it keeps per token."""

    layer: int
    name: str  # e.g. "model.layers.3.self_attn"
    heads: int  # of keys and values
    head_dim: int


def attention_layers(checkpoint: Checkpoint) -> dict[int, Attention]:
    """Every layer with a KV cache, by its index.

    Raises:
        CheckpointError: a kind of attention whose cache is not emulated, or none at all.
    """
    config = checkpoint.text_config
    if config.get("kv_lora_rank"):
        raise CheckpointError(
            f"{checkpoint.path} keeps a latent of {config['kv_lora_rank']} values (kv_lora_rank) in place of keys and "
            "values, which engines quantize in a way of their own: take the KV-cache stage out"
        )
    heads = int(config.get("num_key_value_heads") or config.get("num_attention_heads") or 0)
    found: dict[int, Attention] = {}
    for name in checkpoint.tensors:
        match = KEY_PROJECTION.match(name)
        layer = layer_of(name)
        if match is None or layer is None or class_of(f"{match['attention']}.k_proj", checkpoint) != "Linear":
            continue
        if layer in found:
            raise CheckpointError(
                f"layer {layer} has two attention modules, {found[layer].name} and {match['attention']}: their KV "
                "caches are not told apart"
            )
        found[layer] = Attention(layer, match["attention"], heads, _head_dim(config))
    if not found or not heads:
        raise CheckpointError(f"no layer of {checkpoint.path} is known to keep keys and values: there is no KV cache")
    return found


def misfit(layers: Mapping[int, Attention], scheme: KvScheme) -> str | None:
    """Why the layers cannot take a scheme, None if they can."""
    odd = next((attention.head_dim for attention in layers.values() if attention.head_dim % scheme.divides), None)
    return None if odd is None else f"{scheme.label} needs a head dimension in multiples of {scheme.divides}, not {odd}"


def _head_dim(config: dict[str, object]) -> int:
    given = config.get("head_dim")
    if isinstance(given, int):
        return given
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else 0
