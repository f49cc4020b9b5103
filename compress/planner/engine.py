"""What an engine takes of a GPU before the KV cache gets the rest.

    room = util * total - weights - peak - non_torch - graphs

    peak       what the start-up profile sees at its worst, mostly the sampler over a full batch:
               k * max_num_seqs * vocabulary * 4 bytes (fp32 logits and their sorted copies), or the widest MLP:
               max_num_batched_tokens * 2 * intermediate / tp * 2 bytes, whichever is larger
    non_torch  NCCL and libraries
    graphs     the engine's own estimate of its CUDA graphs, subtracted since vLLM 0.21

k is fitted to published start-up logs and depends on the sampler: 9.6-10.3 where it sorts, 4.2 where a top-k kernel
does the work. Nobody can know these constants for an engine to come, so each is an interval, and one line of the
user's own log replaces them all (`room_from_log`).
"""

from dataclasses import dataclass

from compress.planner.band import Band
from compress.planner.enginelog import EngineLog
from compress.planner.gpus import Gpu
from compress.planner.kv import Layout
from compress.planner.model import Model
from compress.planner.options import Ask, nearest

__all__ = ["ENGINES", "GIB", "Engine", "Limits", "find_engine", "limits", "peak", "room", "room_from_log"]

GIB = 1024**3
LOGS = "start-up logs collected in tests/compress/planner/data/engine_facts.json"


@dataclass(frozen=True)
class Engine:
    """Memory constants of one engine generation.

    util        default share of the GPU
    sampler     k
    non_torch   GiB on one GPU, and on each of several
    graphs      GiB
    """

    name: str
    util: float
    sampler: Band
    non_torch: tuple[Band, Band]
    graphs: Band
    source: str


_TORCH = (Band(0.07, 0.13, 0.15), Band(0.54, 0.55, 0.60))
_NONE = Band.exactly(0.0)
_ENGINES = (
    Engine("vllm", 0.92, Band(1.6, 4.2, 10.3), _TORCH, Band(0.02, 0.5, 2.04), f"vLLM 0.21 and later; {LOGS}"),
    Engine("vllm-0.11", 0.90, Band(4.2, 4.2, 10.3), _TORCH, _NONE, f"vLLM 0.11 to 0.20, kernel sampler; {LOGS}"),
    Engine("vllm-0.10", 0.90, Band(9.59, 9.73, 10.3), _TORCH, _NONE, f"vLLM 0.8 to 0.10, sorting sampler; {LOGS}"),
    Engine("vllm-0.6", 0.90, Band(9.6, 9.73, 10.3), (Band.exactly(1.79),) * 2, _NONE, f"vLLM V0 of 2024; {LOGS}"),
    Engine("vllm-0.2", 0.90, Band(9.6, 9.73, 10.3), (Band.exactly(0.5),) * 2, _NONE, f"vLLM of 2023; {LOGS}"),
)
ENGINES = {engine.name: engine for engine in _ENGINES}


@dataclass(frozen=True)
class Limits:
    """util: share of the GPU; seqs: most requests in a batch; batched: most tokens in a step."""

    util: float
    seqs: int
    batched: int


def find_engine(name: str) -> Engine:
    """An engine generation by name.

    Raises:
        InputError: no such engine, with the nearest name.
    """
    if name not in ENGINES:
        raise nearest("engine", name, list(ENGINES))
    return ENGINES[name]


def limits(ask: Ask, engine: Engine, gpu: Gpu) -> Limits:
    """The engine's limits: what the user set, else vLLM's defaults for a server on this GPU (engine/arg_utils.py)."""
    if gpu.memory >= 160:
        seqs, batched = 1024, 16384
    elif gpu.memory >= 70 and not gpu.name.startswith("A100"):
        seqs, batched = 1024, 8192
    else:
        seqs, batched = 256, 2048
    return Limits(ask.util or engine.util, ask.seqs or seqs, ask.batched or batched)


def peak(model: Model, engine: Engine, limit: Limits, tp: int) -> Band:
    """Bytes of the activation peak on one GPU."""
    logits = limit.seqs * model.get("vocab_size") * 4
    mlp = limit.batched * 2 * model.get("intermediate_size") / tp * 2
    return engine.sampler.rising(lambda k: max(k * logits, mlp))


def room(model: Model, weights: Band, engine: Engine, *, gpu: Gpu, limit: Limits, tp: int) -> Band:
    """Bytes left for the KV cache on one of `tp` GPUs; negative where the model does not fit.

    Args:
        weights: bytes of weights on one GPU.
    """
    total = Band.exactly(limit.util * gpu.memory * GIB)
    fixed = engine.non_torch[min(tp, 2) - 1] + engine.graphs
    return total - weights - peak(model, engine, limit, tp) - fixed.rising(lambda gib: gib * GIB)


def room_from_log(log: EngineLog, layout: Layout, logged_weights: float, weights: float) -> Band:
    """Bytes left for the KV cache when one start-up log of this model on this GPU says what was left then.

    Args:
        layout: the KV cache the log was written with.
        logged_weights: bytes of weights of the checkpoint in the log, used where the log does not say.
        weights: bytes of weights to plan for.
    """
    then = logged_weights if log.weights is None else log.weights * GIB
    if log.kv is not None:
        pool = log.kv * GIB
    elif log.concurrency is not None:
        length, times = log.concurrency
        pool = times * layout.request_bytes(length)
    else:
        pool = (log.tokens or 0) / layout.groups[0].block * layout.block_bytes
    return Band.exactly(pool + then - weights)
