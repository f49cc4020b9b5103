"""The KV cache that a checkpoint asks for, with its static scales, ready to be attached to a model.

An engine that finds no scale takes 1.0 with a line in its log. Here a scale that is missing, zero, negative or not
finite is an error, when it is written and when it is read.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.architectures import layer_of
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from quant.kv.cache import KvEmulation, Scales
from quant.kv.config import kv_scheme_of, scale_names, scale_problem
from quant.kv.layers import Attention, attention_layers, misfit
from quant.kv.schemes import KvScheme

__all__ = ["kv_emulation"]

SIDES: Final = {"k_scale": "keys", "v_scale": "values"}


def kv_emulation(
    checkpoint: Checkpoint, names: Sequence[str], config: PretrainedConfig, device: torch.device
) -> KvEmulation | None:
    """The KV cache that an engine would use for a checkpoint; None for 16 bits.

    Args:
        checkpoint: its configuration and tensors.
        names: its tensors that are scales of a KV cache.
        config: as transformers reads it.
        device: where keys and values will be.

    Raises:
        CheckpointError: a scheme that is not emulated, or scales that do not fit it.
    """
    scheme = kv_scheme_of(checkpoint.config)
    if scheme is None or scheme.scale_shape is None:
        if names:
            raise CheckpointError(f"{names[0]} is a KV-cache scale, but config.json has no kv_cache_scheme for it")
        return (
            None
            if scheme is None
            else KvEmulation(scheme, config, dict.fromkeys(_layers(checkpoint, scheme), Scales()))
        )
    layers = _layers(checkpoint, scheme)
    found = _by_layer(names)
    _check_complete(layers, found)
    return KvEmulation(
        scheme,
        config,
        {
            layer: Scales(
                **{side: _read(checkpoint, name, scheme, attention).to(device) for side, name in found[layer].items()}
            )
            for layer, attention in layers.items()
        },
    )


def _layers(checkpoint: Checkpoint, scheme: KvScheme) -> dict[int, Attention]:
    layers = attention_layers(checkpoint)
    problem = misfit(layers, scheme)
    if problem:
        raise CheckpointError(f"the KV cache of {checkpoint.path} cannot be as config.json says: {problem}")
    return layers


def _by_layer(names: Sequence[str]) -> dict[int, dict[str, str]]:
    """layer -> side -> tensor name."""
    found: dict[int, dict[str, str]] = {}
    for name in names:
        layer, side = layer_of(name), SIDES.get(name.rpartition(".")[2])
        if layer is None or side is None:
            raise CheckpointError(f"{name} is a scale that no emulated KV cache uses: the checkpoint is not read")
        if side in found.setdefault(layer, {}):
            raise CheckpointError(f"{name} and {found[layer][side]} are scales of the same {side}: keep one of them")
        found[layer][side] = name
    return found


def _check_complete(layers: Mapping[int, Attention], found: Mapping[int, Mapping[str, str]]) -> None:
    missing = [
        name
        for a in layers.values()
        for name, side in zip(scale_names(a), SIDES.values(), strict=True)
        if side not in found.get(a.layer, {})
    ]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {2 * len(layers)} KV-cache scales are missing, first {missing[0]}: an engine would "
            "take 1.0 without a word, so write the scales again"
        )
    extra = sorted(found.keys() - layers.keys())
    if extra:
        raise CheckpointError(f"there are KV-cache scales for layers {extra}, which have no KV cache")


def _read(checkpoint: Checkpoint, name: str, scheme: KvScheme, attention: Attention) -> Tensor:
    scale = checkpoint.read(name).to(torch.float32)
    shape = scheme.scale_shape(attention.heads) if scheme.scale_shape else (1,)
    if scale.numel() != torch.Size(shape).numel():
        raise CheckpointError(f"{name} is {list(scale.shape)}, but {scheme.label} has scales of {list(shape)}")
    problem = scale_problem(scale)
    if problem:
        raise CheckpointError(f"{name} {problem}: the KV cache would be damaged, so write the scales again")
    return scale.reshape(shape)
