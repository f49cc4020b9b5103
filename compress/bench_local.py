"""Prefill and decode of checkpoints on this machine, source and variant in turns in one process.

A quantized checkpoint can be measured on two paths, which answer different questions:

    transformers   its own loading: computes in the format where the library has a way to (bitsandbytes, or weights
                   that are unpacked on every pass), and drops what it does not know (KV-cache schemes)
    loader         ours: dequantized weights, inputs and KV cache rounded as an engine would; what a gate costs, and no
                   measure of how fast the format is

No engine is run here: how fast a format serves is measured with `url=`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from compress.bench_options import Local
from compress.checkpoint import Checkpoint, quantization_block
from compress.device import resolve_device
from compress.engines import TRANSFORMERS, loads_in
from compress.errors import CheckpointError, InputError
from compress.progress import say, step
from compress.source import check_usable, fetch_source
from evals.serving import Round
from evals.stopwatch import random_prompt, time_generation
from quant.kv.config import kv_scheme_of
from quant.loader import load_model

__all__ = ["Measured", "measure_local"]

LOADER = "loader"
WARM_UP = 4  # tokens


@dataclass(frozen=True)
class Side:
    """A checkpoint on one path; `baseline` is the side it is compared with."""

    name: str
    checkpoint: Checkpoint
    path: str


@dataclass(frozen=True)
class Measured:
    """Rounds by side, and of each side its path and bytes: on disk, and of parameters in memory."""

    rounds: dict[str, list[Round]]
    sides: dict[str, dict[str, Any]]


def measure_local(options: Local) -> Measured:
    """Load all sides, warm up, and generate in turns.

    Raises:
        InputError: a checkpoint that cannot be measured as asked.
    """
    device = resolve_device(options.device)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    sides = _sides(options)
    models = {side.name: _load(side, device, options) for side in sides}
    vocabulary = min(int(model.config.get_text_config(decoder=True).vocab_size) for model in models.values())
    prompt = random_prompt(vocabulary, batch=options.batch, tokens=options.prompt)
    for model in models.values():
        _check_length(model, options)
        time_generation(model, prompt, tokens=WARM_UP)
    rounds: dict[str, list[Round]] = {name: [] for name in models}
    with step("generating in turns", options.rounds * len(models)) as advance:
        for turn in range(options.rounds):
            for name in models if turn % 2 == 0 else reversed(models):
                rounds[name].append(time_generation(models[name], prompt, tokens=options.output))
                advance(1)
    return Measured(rounds, {side.name: _record(side, models[side.name]) for side in sides})


def _sides(options: Local) -> list[Side]:
    """Baseline first; a variant once for each path that works."""
    given = {"baseline": options.baseline, "variant": options.directory}
    found = []
    for label, model in given.items():
        if model is None:
            continue
        checkpoint = Checkpoint.open(fetch_source(model, say=say))
        check_usable(checkpoint, trust_remote_code=options.trust_remote_code)
        paths = _paths(checkpoint, options.path)
        found += [Side(label if len(paths) == 1 else f"{label}, {path}", checkpoint, path) for path in paths]
    return found


def _paths(checkpoint: Checkpoint, wanted: str | None) -> list[str]:
    """The paths to measure: one for 16 bits, where both compute the same."""
    able = TRANSFORMERS in loads_in(checkpoint.config) and kv_scheme_of(checkpoint.config) is None
    if wanted == TRANSFORMERS and not able:
        raise InputError(
            f"transformers does not compute {checkpoint.path} as it is stored: leave path out, or take path={LOADER}"
        )
    if wanted:
        return [wanted]
    if not able:
        return [LOADER]
    return [TRANSFORMERS, LOADER] if quantization_block(checkpoint.config) else [TRANSFORMERS]


def _load(side: Side, device: torch.device, options: Local) -> PreTrainedModel:
    """The model in evaluation mode."""
    say(f"loading {side.checkpoint.path} ({side.path})")
    return LOADERS[side.path](side.checkpoint, device, options)


def _with_transformers(checkpoint: Checkpoint, device: torch.device, options: Local) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=_dtype(checkpoint, options),
            device_map={"": device},
            trust_remote_code=options.trust_remote_code,
            local_files_only=True,
        )
    except (ValueError, RuntimeError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"transformers cannot load {checkpoint.path} ({reason}): take path={LOADER}") from error
    return model


def _with_loader(checkpoint: Checkpoint, device: torch.device, options: Local) -> PreTrainedModel:
    dtype = _dtype(checkpoint, options)
    return load_model(checkpoint.path, dtype=dtype, device=device, trust_remote_code=options.trust_remote_code).model


LOADERS: dict[str, Callable[[Checkpoint, torch.device, Local], PreTrainedModel]] = {
    TRANSFORMERS: _with_transformers,
    LOADER: _with_loader,
}


def _dtype(checkpoint: Checkpoint, options: Local) -> torch.dtype:
    """The type the checkpoint computes in by its own word, bfloat16 where it has none, unless one is asked for."""
    own = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
    return getattr(torch, str(own) if options.dtype == "auto" else options.dtype)  # type: ignore[no-any-return]


def _check_length(model: PreTrainedModel, options: Local) -> None:
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest and options.prompt + options.output > longest:
        raise InputError(
            f"prompt={options.prompt} and output={options.output} are longer than the {longest} positions of "
            f"{model.name_or_path}: make them smaller"
        )


def _record(side: Side, model: PreTrainedModel) -> dict[str, Any]:
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return {
        "checkpoint": str(side.checkpoint.path),
        "path": side.path,
        "bytes_on_disk": side.checkpoint.nbytes,
        "bytes_in_memory": held,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
