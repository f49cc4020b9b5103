"""What a plan took for granted, in sentences: everything a reader must know to disagree."""

from typing import TYPE_CHECKING

from compress.planner.band import Band
from compress.planner.kv import attention_layers
from compress.planner.roofline import KV_EFFICIENCY, MFU, WEIGHT_EFFICIENCY

if TYPE_CHECKING:
    from compress.planner.plan import Setting

__all__ = ["assumptions"]


def assumptions(given: "Setting", tp: int) -> tuple[str, ...]:
    """The sentences that hold for this plan."""
    return (*_model(given), *_machine(given, tp), *_speed(given, tp))


def _model(given: "Setting") -> list[str]:
    model = given.model
    source = "safetensors headers" if model.measured else "the config alone: no safetensors headers were found"
    found = [f"{model.parameters / 1e9:.3f}e9 parameters, counted from {source}"]
    skipped = sum(weight.numel for weight in model.weights if weight.role == "mtp")
    if skipped:
        found.append(f"{skipped / 1e9:.2f}e9 parameters of multi-token prediction are not loaded")
    found.append("embeddings, head, norms, routers and vision towers stay in 16 bits in every format")
    if model.experts:
        found.append(f"all {model.experts} experts of a layer are in memory; routing is taken as uniform")
    return found


def _machine(given: "Setting", tp: int) -> list[str]:
    gpu, engine, limit = given.gpu, given.engine, given.limit
    found = [f"{gpu.name} has {gpu.memory:.2f} GiB ({gpu.measured}), {gpu.bandwidth} TB/s; source: {gpu.source}"]
    if given.log is not None:
        found.append(f"the room is calibrated with your log, taken as written at tp={tp} with a 16-bit KV cache")
    else:
        found.append(
            f"engine {engine.name}: {limit.util:g} of the GPU, {limit.seqs} sequences and {limit.batched} tokens a "
            f"step; peak {_range(engine.sampler)} times the logits, CUDA graphs {_range(engine.graphs)} GiB "
            "(low-best-high), which log= replaces"
        )
    if gpu.measured != "torch":
        found.append(f"the memory of {gpu.name} was read from {gpu.measured}: PyTorch may see up to 1% less")
    if tp > 1:
        found.append(f"weights, room and KV cache are those of one of {tp} GPUs")
    layers = attention_layers(given.model, tp)
    if any(layer.window for layer in layers):
        found.append(f"windowed layers are charged their window and the {limit.batched} tokens of a step, as in vLLM")
    if any(layer.state for layer in layers):
        found.append("recurrent layers keep one state per request, without prefix caching or speculation")
    return found


def _speed(given: "Setting", tp: int) -> list[str]:
    found = [
        f"every user holds {given.prompt} prompt and {given.answer} answer tokens, without prefix caching; TTFT with "
        "an empty queue; TPOT on a server that is always full, prefills included",
        f"efficiencies low-best-high: weights {_range(WEIGHT_EFFICIENCY)}, KV {_range(KV_EFFICIENCY)}, "
        f"multiplication {_range(MFU)} of the peak",
    ]
    return [*found, "communication between GPUs takes no time"] if tp > 1 else found


def _range(band: Band) -> str:
    return f"{band.low:g}-{band.best:g}-{band.high:g}"
