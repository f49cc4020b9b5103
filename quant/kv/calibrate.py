"""Static scales of a KV cache from the largest keys and values on calibration texts.

The texts go through the model one at a time, each as a sequence of its own, so that nothing is padding and every one
begins as texts do in use: the first tokens often have the largest keys. Keys are seen after the rotary embedding, as
they are stored. The whole model is loaded, as the evaluation of the result does anyway.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, InputError, Refused
from quant.kv.cache import KvEmulation, Scales
from quant.kv.config import scale_names, scale_problem
from quant.kv.layers import Attention, attention_layers
from quant.kv.plan import KvPlan
from quant.kv.schemes import KvScheme
from quant.kv.statistics import LayerStatistics, SideStatistics
from quant.loader import load_model

__all__ = ["find_scales", "observe_texts", "static_scales"]


@torch.inference_mode()
def observe_texts(
    directory: Path,
    texts: Sequence[str],
    *,
    max_tokens: int,
    device: torch.device,
    trust_remote_code: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[int, LayerStatistics]:
    """What the KV cache of each layer holds while the texts are read, each to its first `max_tokens` tokens.

    `advance` is told 1 after each text.

    Raises:
        InputError: no texts.
        CheckpointError: no tokenizer, or a kind of attention that is not emulated.
    """
    if not texts:
        raise InputError("there are no calibration texts: give some, or set calibrate to cast")
    layers = attention_layers(Checkpoint.open(directory))
    loaded = load_model(directory, device=device, trust_remote_code=trust_remote_code)
    if loaded.tokenizer is None:
        raise CheckpointError(f"{directory} has no tokenizer to read calibration texts with: set calibrate to cast")
    emulation = KvEmulation(None, loaded.model.config, dict.fromkeys(layers, Scales()))
    for text in texts:
        ids = loaded.tokenizer(text, truncation=True, max_length=max_tokens, return_tensors="pt")["input_ids"]
        loaded.model.base_model(input_ids=ids.to(device), cache=emulation.make_cache([ids.shape[1]]), use_cache=True)
        advance(1)
    return emulation.complete()


def find_scales(
    plan: KvPlan, texts: Sequence[str] | None, *, max_tokens: int, device: torch.device, trust_remote_code: bool = False
) -> dict[str, Tensor]:
    """The scales that a planned stage writes, by tensor name: calibrated on texts, or 1 where there are to be none.

    Raises:
        CompressError: what `observe_texts` and `static_scales` refuse.
    """
    if not plan.scales or texts is None:
        return {name: torch.ones(spec.shape) for name, spec in plan.scales.items()}
    directory = plan.checkpoint.path
    found = observe_texts(directory, texts, max_tokens=max_tokens, device=device, trust_remote_code=trust_remote_code)
    return static_scales(found, plan.layers, plan.scheme)


def static_scales(
    statistics: Mapping[int, LayerStatistics], layers: Mapping[int, Attention], scheme: KvScheme
) -> dict[str, Tensor]:
    """The scales to store, float32, by tensor name: absmax over what shares a scale, divided by the grid's end.

    Raises:
        Refused: an absmax that is zero or not finite, or another number of heads than config.json says.
    """
    scales = {}
    for layer, attention in layers.items():
        found = statistics[layer]
        for name, side in zip(scale_names(attention), (found.keys, found.values), strict=True):
            scales[name] = _scale(name, side, attention, scheme)
    return scales


def _scale(name: str, side: SideStatistics, attention: Attention, scheme: KvScheme) -> Tensor:
    absmax = torch.zeros(0) if side.absmax is None else side.absmax.cpu()
    if len(absmax) != attention.heads:
        raise Refused(f"{attention.name} has {len(absmax)} key-value heads, but config.json says {attention.heads}")
    shape = scheme.scale_shape(attention.heads) if scheme.scale_shape else ()
    scale = (absmax if torch.Size(shape).numel() == len(absmax) else absmax.amax()).reshape(shape) / scheme.largest
    problem = scale_problem(scale)
    if problem:
        raise Refused(f"{name} {problem}, as no calibration text gives another absmax: set calibrate to cast")
    return scale
