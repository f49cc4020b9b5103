"""What a checkpoint says about its KV cache: the scheme in config.json, and static scales among the tensors.

A scheme that engines serve is compressed-tensors' `kv_cache_scheme`, with `k_scale` and `v_scale` on each attention
module. Every other one is named under `emulated_kv_cache` in config.json, a key of ours that engines ignore and that
transformers carries along when it saves, since what is evaluated must be what is on disk.

An engine that finds no scale takes 1.0 with a line in its log. Here a scale that is missing, zero, negative or not
finite is an error, when it is written and when it is read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from compress.architectures import layer_of
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, RecipeError
from quant.kv.cache import KvEmulation, Scales
from quant.kv.layers import Attention, attention_layers, misfit
from quant.kv.schemes import SCHEMES, KvScheme, make_scheme
from quant.scheme import kv_cache_scheme_of, normal_arguments, quantization_config

__all__ = ["EMULATED", "config_with_scheme", "kv_emulation", "kv_scheme_of", "scale_names", "scale_problem"]

EMULATED: Final = "emulated_kv_cache"
SIDES: Final = {"k_scale": "keys", "v_scale": "values"}


def kv_scheme_of(config: Mapping[str, Any]) -> KvScheme | None:
    """The KV-cache scheme that config.json asks for, None for 16 bits.

    Raises:
        CheckpointError: a scheme that is not known, or two of them.
    """
    arguments, named = kv_cache_scheme_of(config), config.get(EMULATED)
    if arguments is not None and named is not None:
        raise CheckpointError(f"config.json has a kv_cache_scheme and {EMULATED}: remove one of them")
    if arguments is not None:
        return _served(arguments)
    return None if named is None else _emulated(named)


def _served(arguments: Mapping[str, Any]) -> KvScheme:
    given = normal_arguments("kv_cache_scheme", arguments)
    schemes = [make_scheme("fp8", granularity=value) for value in SCHEMES["fp8"].options["granularity"].allowed]
    for scheme in schemes:
        if scheme.arguments and normal_arguments("kv_cache_scheme", scheme.arguments) == given:
            return scheme
    raise CheckpointError(
        f"kv_cache_scheme {dict(arguments)} is not emulated: known are {', '.join(s.label for s in schemes)}"
    )


def _emulated(named: Any) -> KvScheme:
    try:
        options = dict(named)
        return make_scheme(options.pop("scheme"), **options)
    except (RecipeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json has {EMULATED} {named!r}, which is not read: {error}") from error


def config_with_scheme(config: Mapping[str, Any], scheme: KvScheme) -> dict[str, Any]:
    """config.json with the scheme added to whatever it says about weights.

    Raises:
        RecipeError: there is a scheme already, or the weights are stored in a way that cannot say it.
    """
    present = kv_scheme_of(config)
    if present:
        raise RecipeError(f"the KV cache is quantized already, to {present.label}: give the checkpoint it came from")
    if scheme.arguments is None:
        return dict(config) | {EMULATED: {"scheme": scheme.name, **scheme.options}}
    key = "compression_config" if "compression_config" in config else "quantization_config"
    block = dict(config.get(key) or quantization_config([], [], scheme.arguments))
    method = block.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise RecipeError(f"{method} weights cannot be combined with a KV-cache scheme: use another weight format")
    return dict(config) | {key: block | {"kv_cache_scheme": dict(scheme.arguments)}}


def scale_names(attention: Attention) -> tuple[str, str]:
    """Tensor names of a layer's scales, keys first."""
    return f"{attention.name}.k_scale", f"{attention.name}.v_scale"


def scale_problem(scale: Tensor) -> str | None:
    """Why a scale cannot be used, None if it can."""
    wrong = scale[~((scale > 0) & scale.isfinite())]
    return f"is {wrong.flatten()[0].item()}, not a positive number" if wrong.numel() else None


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
