"""A KV cache that computes as a quantized one: what enters it is rounded, and attention reads the rounded values.

That holds in prefill, in scoring and in generation alike, for transformers' own cache layers do the bookkeeping: full
attention, sliding windows, any number of key-value heads. (Its `QuantizedCache` hands the first pass back unrounded, so
that a whole document scored in one pass seems to lose nothing.)

Schemes that round a group of tokens together keep the newest tokens in a block as they are, and round it when the next
block begins. Fed in passes of one block (`chunk`), every token reads exactly what it would in generation; a longer pass
rounds all blocks but the last at once, and so reads a little worse.

`KvEmulation.attach` makes a model use such caches whoever calls it: without it, a caller who does not think of the KV
cache would measure a model that no engine runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from compress.errors import Refused
from quant.kv.rounding import Rounding
from quant.kv.schemes import KvScheme
from quant.kv.statistics import LayerStatistics, describe

__all__ = ["EmulatedCache", "KvEmulation", "Scales"]


@dataclass(frozen=True)
class Scales:
    """A layer's stored scales, float32 (1,) or (H, 1, 1); None where they are found at run time."""

    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass
class KvEmulation:
    """The quantized KV cache of a model: makes caches, and gathers what goes through those whose rows it is told.

    scheme   None rounds nothing, to gather statistics for calibration
    config   of the model, which tells its kinds of layers
    scales   of every layer that has a cache, and of no other
    """

    scheme: KvScheme | None
    config: PretrainedConfig
    scales: Mapping[int, Scales]
    statistics: dict[int, LayerStatistics] = field(default_factory=dict)

    def make_cache(self, lengths: Sequence[int] | None = None) -> "EmulatedCache":
        """An empty cache; of each row the first `lengths` tokens are counted, the rest being padding (None: none)."""
        return EmulatedCache(self, lengths)

    def attach(self, model: PreTrainedModel) -> None:
        """From here on every pass of `model` without a cache, or with an empty one, gets one of these."""

        def provide(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            given = kwargs.get("cache")
            if isinstance(given, EmulatedCache):
                return args, kwargs
            if given is not None and given.get_seq_length():
                raise Refused(f"the KV cache is emulated, but the model was given a {type(given).__name__} in use")
            return args, kwargs | {"cache": self.make_cache()}  # generate() goes on with the one that comes back

        model.base_model.register_forward_pre_hook(provide, with_kwargs=True)

    def observe(self, layer: int, keys: Tensor, values: Tensor, valid: Tensor | None) -> None:
        """Count keys and values (B, H, T, D) that enter, of the tokens `valid` (B, T)."""
        scales = self.scales[layer]
        statistics = self.statistics.setdefault(layer, LayerStatistics())
        statistics.keys.add(keys, valid, scales.keys)
        statistics.values.add(values, valid, scales.values)

    def record(self) -> dict[str, Any]:
        """Plain data for a report: the scheme, who serves it, and per layer what its keys and values were like.

        Raises:
            Refused: as `complete`.
        """
        layers = [
            {
                "layer": layer,
                "keys": describe(found.keys, self.scales[layer].keys),
                "values": describe(found.values, self.scales[layer].values),
            }
            for layer, found in self.complete().items()
        ]
        scheme = self.scheme
        return {"scheme": scheme and scheme.label, "serving": scheme and scheme.serving, "layers": layers}

    def complete(self) -> dict[int, LayerStatistics]:
        """What every layer has seen, in order.

        Raises:
            Refused: keys or values that are not finite, which a cache may hide by saturating; a layer whose keys and
                values never came by, so that the model ignores the cache it is given.
        """
        idle = [layer for layer in self.scales if layer not in self.statistics]
        if idle:
            raise Refused(
                f"the attention of layers {idle} passed no keys and values to the KV cache, so its quantization was "
                "not measured: this model's code is not supported"
            )
        broken = [layer for layer, found in self.statistics.items() if not (found.keys.finite and found.values.finite)]
        if broken:
            raise Refused(f"the keys or values of layers {sorted(broken)} hold NaN or infinity")
        return dict(sorted(self.statistics.items()))


class EmulatedCache(DynamicCache):
    """transformers' growing cache with rounding on entry; made by `KvEmulation.make_cache`."""

    def __init__(self, emulation: KvEmulation, lengths: Sequence[int] | None) -> None:
        super().__init__(config=emulation.config)
        self._emulation = emulation
        self._lengths = None if lengths is None else torch.tensor(lengths)
        self.chunk = (emulation.scheme.residual if emulation.scheme else 0) or None
        self._check_windows()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take keys and values (B, H, T, D); give back all that attention may read, rounded."""
        emulation = self._emulation
        if layer_idx not in emulation.scales:
            raise Refused(f"layer {layer_idx} has a KV cache of its own, but no projection to keys in the checkpoint")
        layer: Any = self.layers[layer_idx]
        seen = layer.get_seq_length()
        if self._lengths is not None:
            emulation.observe(layer_idx, key_states, value_states, self._valid(seen, key_states.shape[-2]))
        scheme, scales = emulation.scheme, emulation.scales[layer_idx]
        if scheme and not scheme.residual:
            key_states = scheme.keys(key_states, scales.keys)
            value_states = scheme.values(value_states, scales.values)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if scheme and scheme.residual:
            total = seen + key_states.shape[-2]
            first = total - keys.shape[-2]  # position of the oldest token that is left
            begin, end = (_settled(tokens, scheme.residual) - first for tokens in (seen, total))
            keys, values = _replace(keys, scheme.keys, begin, end), _replace(values, scheme.values, begin, end)
            kept = layer.keys.shape[-2]
            layer.keys, layer.values = keys[..., -kept:, :], values[..., -kept:, :]
        return keys, values

    def _valid(self, seen: int, tokens: int) -> Tensor | None:
        """(B, T): which of the entering tokens are no padding; None for all."""
        assert self._lengths is not None
        if int(self._lengths.min()) >= seen + tokens:
            return None
        return torch.arange(seen, seen + tokens) < self._lengths[:, None]

    def _check_windows(self) -> None:
        """A block must not leave the window before it is rounded."""
        windows = [window for layer in self.layers if (window := getattr(layer, "sliding_window", None))]
        if self.chunk and windows and min(windows) <= self.chunk:
            raise Refused(
                f"a sliding window of {min(windows)} tokens is no longer than the residual of {self.chunk}: give a "
                "shorter residual, or a scheme that rounds each token by itself"
            )


def _settled(tokens: int, block: int) -> int:
    """Of so many tokens, the first ones that are rounded: all blocks but the newest."""
    return max(0, (tokens - 1) // block * block)


def _replace(x: Tensor, rounding: Rounding, begin: int, end: int) -> Tensor:
    if begin >= end:
        return x
    return torch.cat([x[..., :begin, :], rounding(x[..., begin:end, :], None), x[..., end:, :]], dim=-2)
