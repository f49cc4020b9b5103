"""The `quantization_config` block of config.json: written for our formats, and read back from anyone's file.

One format for every linear is written as the class target `Linear` with an explicit ignore list. Several formats are
written as exact names, or as regular expressions that match nothing else, and never as a class: vLLM looks up a fused
layer (qkv_proj) by its parts' names only where no class already matched. Only keys whose value matters are written,
because older readers forbid keys they do not know inside a group.

Reading refuses rather than guesses: whatever changes the arithmetic and is not emulated is an error.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compress.checkpoint import quantization_block
from compress.errors import CheckpointError
from compress.select import strength
from quant.activations import is_emulated
from quant.format import Format
from quant.formats import FORMATS, Option, make_format

__all__ = [
    "formats_of",
    "kv_cache_scheme_of",
    "normal_arguments",
    "quantization_config",
]

Lookup = Callable[[str, str], Format | None]

LAYOUT_VERSION = "0.20.1"  # the compressed-tensors release whose layout is written
MIXED = "mixed-precision"
# older names of a layout that stores the same bytes
ALIASES = {"naive-quantized": ("float-quantized", "int-quantized")}
DEFAULTS: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": None,
    "group_size": None,
    "block_structure": None,
    "dynamic": False,
    "scale_dtype": None,
}
NOT_ARITHMETIC = {"observer", "observer_kwargs", "zp_dtype", "actorder"}  # how scales were found, or implied
BY_GROUP = ("group", "tensor_group")


def quantization_config(
    groups: Sequence[tuple[Format, Sequence[str]]],
    ignore: Sequence[str],
    kv_cache_scheme: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The block for config.json; empty where nothing is quantized.

    Args:
        groups: formats and the full names of the modules stored in each; a format that needs no entry is left out.
        ignore: full names of every other matrix an engine runs as a linear layer: head, routers, other towers.
        kv_cache_scheme: compressed-tensors' QuantizationArgs of the KV cache.

    Raises:
        ValueError: a module in two places, or bitsandbytes together with anything else, which has no way to say it.
    """
    stored = [(fmt, list(names)) for fmt, names in groups if fmt.quant_method and names]
    ignored = [*ignore, *(name for fmt, names in groups if not fmt.quant_method for name in names)]
    _check_disjoint([*(names for _, names in stored), ignored])
    if any(fmt.quant_method == "bitsandbytes" for fmt, _ in stored):
        return _bitsandbytes(stored, ignored, kv_cache_scheme)
    if not stored and kv_cache_scheme is None:
        return {}
    layouts = {fmt.layout_name for fmt, _ in stored} or {"dense"}
    return {
        "quant_method": "compressed-tensors",
        "version": LAYOUT_VERSION,
        "format": layouts.pop() if len(layouts) == 1 else MIXED,
        "quantization_status": "compressed",
        "ignore": ignored,
        "kv_cache_scheme": None if kv_cache_scheme is None else dict(kv_cache_scheme),
        "config_groups": {
            f"group_{i}": _group(fmt, targets)
            for i, ((fmt, _), targets) in enumerate(zip(stored, _targets(stored, ignored), strict=True))
        },
    }


def _check_disjoint(places: Sequence[Sequence[str]]) -> None:
    seen: set[str] = set()
    for name in itertools.chain.from_iterable(places):
        if name in seen:
            raise ValueError(f"module {name!r} is named twice")
        seen.add(name)


def _group(fmt: Format, targets: list[str]) -> dict[str, Any]:
    return {
        "targets": targets,
        "format": fmt.layout_name,
        "weights": dict(fmt.weights or {}),
        "input_activations": None if fmt.activations is None else dict(fmt.activations),
        "output_activations": None,
    }


def _bitsandbytes(
    stored: Sequence[tuple[Format, Sequence[str]]], ignored: list[str], kv_cache_scheme: Mapping[str, Any] | None
) -> dict[str, Any]:
    if len(stored) > 1 or kv_cache_scheme is not None:
        others = [fmt.name for fmt, _ in stored] + ["a KV-cache scheme"] * (kv_cache_scheme is not None)
        raise ValueError(f"bitsandbytes cannot be combined in one checkpoint: {', '.join(others)}")
    return {"quant_method": "bitsandbytes", **(stored[0][0].weights or {}), "llm_int8_skip_modules": ignored}


def _targets(stored: Sequence[tuple[Format, list[str]]], ignored: Sequence[str]) -> list[list[str]]:
    if len(stored) == 1:
        return [["Linear"]]
    places = [*(names for _, names in stored), ignored]
    used: dict[str, set[int]] = {}  # pattern -> the places that have a name of it
    for place, names in enumerate(places):
        for pattern in itertools.chain.from_iterable(map(_patterns, names)):
            used.setdefault(pattern, set()).add(place)
    return [list(dict.fromkeys(_widest(name, used) for name in names)) for names in places[:-1]]


def _widest(name: str, used: Mapping[str, set[int]]) -> str:
    """The most general pattern of `name` that matches no module of another place, else the name itself."""
    return next((f"re:{pattern}" for pattern in _patterns(name) if len(used[pattern]) == 1), name)


def _patterns(name: str) -> Iterator[str]:
    """Regular expressions for the same module in all layers and experts, then in all experts of its layer."""
    parts = [re.escape(part) for part in name.split(".")]
    indices = [i for i, part in enumerate(parts) if part.isdigit()]
    for free in (indices, indices[-1:]) if len(indices) > 1 else (indices,):
        if free:
            yield r"\.".join(r"\d+" if i in free else part for i, part in enumerate(parts)) + "$"


def formats_of(config: Mapping[str, Any]) -> Lookup:
    """How each module of a checkpoint is stored: (full name, class name) -> its format, None for 16 bits.

    Args:
        config: config.json.

    Raises:
        CheckpointError: a method, layout, or option that is not read.
    """
    block = quantization_block(config)
    if block is None:
        return lambda name, cls: None
    method = block.get("quant_method", "compressed-tensors")
    if method not in READERS:
        raise CheckpointError(
            f"quant_method {method!r} is not read: give a checkpoint of {' or '.join(READERS)}, or the 16-bit source"
        )
    try:
        return READERS[method](block)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"quantization_config is damaged ({error!r}): fetch config.json again") from error


def kv_cache_scheme_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """compressed-tensors' QuantizationArgs of the KV cache that config.json asks for, None for 16 bits."""
    block = quantization_block(config) or {}
    scheme = block.get("kv_cache_scheme")
    return None if scheme is None else dict(scheme)


def _read_compressed_tensors(block: Mapping[str, Any]) -> Lookup:
    for key in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        if block.get(key):
            raise CheckpointError(f"quantization_config has a {key}, which is not read: {_shown(block[key])}")
    status = block.get("quantization_status", "compressed")
    if status != "compressed":
        raise CheckpointError(
            f"quantization_status is {status!r}: only a compressed checkpoint is read, save it as one"
        )
    groups = [
        (entry["targets"], _read_group(name, entry, block.get("format")))
        for name, entry in (block.get("config_groups") or {}).items()
        if _is_group(name, entry)
    ]
    ignore = block.get("ignore") or []

    def lookup(name: str, cls: str) -> Format | None:
        if strength(ignore, name, cls):
            return None
        strengths = [strength(targets, name, cls) for targets, _ in groups]
        best = max(strengths, default=0)
        return groups[strengths.index(best)][1] if best else None

    return lookup


def _is_group(name: str, entry: Any) -> bool:
    if not isinstance(entry, Mapping) or "targets" not in entry:
        raise CheckpointError(f"quantization group {name!r} is {_shown(entry)}, which names no targets and is not read")
    return True


def _read_group(name: str, entry: Mapping[str, Any], layout: str | None) -> Format:
    if entry.get("output_activations"):
        raise CheckpointError(f"quantization group {name!r} quantizes outputs, which is not read")
    layout = entry.get("format") or layout
    weights = normal_arguments(name, entry.get("weights") or {})
    known = [fmt for fmt in _readable("compressed-tensors") if _stores(fmt, weights, layout)]
    if not known:
        raise CheckpointError(
            f"quantization group {name!r} stores {layout} of {_shown(weights)}, which is not read: known formats are "
            f"{', '.join(FORMATS)}"
        )
    activations = normal_arguments(name, entry["input_activations"]) if entry.get("input_activations") else None
    if activations is not None and not is_emulated(activations):
        raise CheckpointError(
            f"quantization group {name!r} has inputs of {_shown(activations)}, which are not emulated"
        )
    # the options of a format with such inputs, where there is one: `inspect` shows them
    same = [fmt for fmt in known if (fmt.activations and normal_arguments("", fmt.activations)) == activations]
    return replace((same or known)[0], activations=activations)


def normal_arguments(group: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """QuantizationArgs with every default filled in and what does not change the arithmetic left out.

    Raises:
        CheckpointError: keys or a column order that are not read; `group` names the place in the message.
    """
    unknown = sorted(set(args) - set(DEFAULTS) - NOT_ARITHMETIC)
    if unknown:
        raise CheckpointError(f"quantization group {group!r} has {', '.join(unknown)}, which is not read")
    if args.get("actorder") not in (None, False, "static", "weight"):
        raise CheckpointError(
            f"quantization group {group!r} reorders columns (actorder {args['actorder']!r}), which is not read: "
            "quantize again with actorder static"
        )
    out = {key: default if args.get(key) is None else args[key] for key, default in DEFAULTS.items()}
    out["strategy"] = out["strategy"] or _strategy(out["group_size"])
    if out["strategy"] not in BY_GROUP:
        out["group_size"] = None
    if out["strategy"] == "tensor_group":
        out["scale_dtype"] = out["scale_dtype"] or "torch.float8_e4m3fn"  # implied before the key existed
    return out


def _strategy(group_size: int | None) -> str:
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


@functools.cache
def _readable(method: str) -> list[Format]:
    """Every format of a quantization method, with every legal choice of options, defaults first."""
    formats = [
        make_format(name, **dict(zip(family.options, values, strict=True)))
        for name, family in FORMATS.items()
        for values in itertools.product(*map(_defaults_first, family.options.values()))
    ]
    return [fmt for fmt in formats if fmt.quant_method == method]


def _defaults_first(option: Option) -> list[Any]:
    return [option.default, *(value for value in option.allowed if value != option.default)]


def _stores(fmt: Format, weights: Mapping[str, Any], layout: str | None) -> bool:
    same_layout = layout == fmt.layout_name or fmt.layout_name in ALIASES.get(layout or "", ())
    return same_layout and normal_arguments("", fmt.weights or {}) == weights


def _read_bitsandbytes(block: Mapping[str, Any]) -> Lookup:
    """Our own files: the block equals one of our formats' in every key that it has."""
    skipped = block.get("llm_int8_skip_modules") or []
    known = _readable("bitsandbytes")
    fmt = next((fmt for fmt in known if (fmt.weights or {}).items() <= block.items()), None)
    if fmt is None:
        raise CheckpointError(
            f"this bitsandbytes checkpoint is not read: known are {_shown([fmt.weights for fmt in known])}"
        )
    if fmt.activations:
        fmt = replace(fmt, activations={**fmt.activations, "llm_int8_threshold": block["llm_int8_threshold"]})
    return lambda name, cls: fmt if cls == "Linear" and name not in skipped else None


READERS: Mapping[str, Callable[[Mapping[str, Any]], Lookup]] = {
    "compressed-tensors": _read_compressed_tensors,
    "bitsandbytes": _read_bitsandbytes,
}


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
