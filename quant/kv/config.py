"""What config.json says about the KV cache, and what is called how among the tensors; no model code.

A scheme that engines serve is compressed-tensors' `kv_cache_scheme`, with `k_scale` and `v_scale` on each attention
module. Every other one is named under `emulated_kv_cache` in config.json, a key of ours that engines ignore and that
transformers carries along when it saves, since what is evaluated must be what is on disk.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from compress.checkpoint import BLOCKS, quantization_block
from compress.errors import CheckpointError, RecipeError
from quant.kv.layers import Attention
from quant.kv.schemes import SCHEMES, KvScheme, make_scheme
from quant.scheme import kv_cache_scheme_of, normal_arguments, quantization_config

__all__ = ["EMULATED", "config_with_scheme", "kv_scheme_of", "scale_names", "scale_problem"]

EMULATED: Final = "emulated_kv_cache"


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
    key = next((key for key in BLOCKS if config.get(key) is not None), BLOCKS[0])
    block = quantization_block(config) or quantization_config([], [], scheme.arguments)
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
