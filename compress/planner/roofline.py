"""Speed from first principles: what the GPU must read and multiply, divided by how fast it can.

Decode, b users at context n, is bound by memory:
    step = weights read / (bandwidth * e_w) + b * KV bytes read / (bandwidth * e_kv), at least the multiplications' time
Prefill of n tokens is bound by compute:
    T_p = (2 P_active n / peak of the format + attention / 16-bit peak) / MFU,  attention = 4 L H d n min(n, window) / 2
TTFT is T_p with an empty queue. A server that is always full interleaves one prefill per request with everybody's
decoding, so that TPOT = step + b T_p / answer tokens.

The efficiencies are fitted to published vLLM measurements (docs/planner.md); with all of them at 1 the result is a
bound that no kernel can beat. Left out: communication between GPUs, kernel launches, speculative decoding, prefix
caching.
"""

from dataclasses import dataclass

from compress.planner.band import Band
from compress.planner.formats import KvFormat
from compress.planner.gpus import Gpu
from compress.planner.kv import Layer, attention_layers
from compress.planner.model import Model
from compress.planner.weights import active_parameters, compute_type, decode_read

__all__ = ["WEIGHT_EFFICIENCY", "Speed", "decode_step", "prefill", "speed"]

WEIGHT_EFFICIENCY = Band(0.48, 0.70, 1.0)  # B200 (launch-bound) and H100, Llama-3.1-8B, against the bound
KV_EFFICIENCY = Band(0.82, 0.90, 1.0)  # FP8 and bf16 KV, H100
MFU = Band(0.40, 0.56, 1.0)  # 20k-token prefill on H100, Llama-3.1-8B


@dataclass(frozen=True)
class Speed:
    """Seconds, and tokens per second of the whole batch; each band from slow-at-best to what the hardware allows."""

    ttft: Band
    tpot: Band
    tokens_per_second: Band


def _seconds(fastest: float, efficiency: Band) -> Band:
    return Band(fastest / efficiency.high, fastest / efficiency.best, fastest / efficiency.low)


def prefill(model: Model, fmt: str, gpu: Gpu, *, tokens: int, tp: int) -> Band:
    """Seconds until the first token of a prompt of `tokens`, alone on the machine."""
    linear = 2 * active_parameters(model) * tokens / gpu.tflops(compute_type(model, fmt))
    scores = (
        sum(n * _attention_flops(model, layer, tokens) for layer, n in attention_layers(model, 1).items()) / gpu.bf16
    )
    compute = _seconds((linear + scores) / (1e12 * tp), MFU)
    memory = _seconds(decode_read(model, fmt, tp, tokens) / (gpu.bandwidth * 1e12), WEIGHT_EFFICIENCY)
    return Band(*(max(pair) for pair in zip(_triple(compute), _triple(memory), strict=True)))


def _triple(band: Band) -> tuple[float, float, float]:
    return band.low, band.best, band.high


def _attention_flops(model: Model, layer: Layer, tokens: int) -> float:
    """Multiply-adds of causal attention, twice; nothing for recurrent layers, which are linear in `tokens`."""
    if layer.state:
        return 0.0
    heads = model.get("num_attention_heads")
    dims = (layer.key + layer.value) or model.get("qk_nope_head_dim") + model.get("qk_rope_head_dim") + model.get(
        "v_head_dim"
    )
    seen = min(tokens, layer.window) if layer.window else tokens / 2
    return 2.0 * heads * dims * tokens * seen


def decode_step(model: Model, fmt: str, kv: KvFormat, *, gpu: Gpu, tp: int, load: tuple[int, int]) -> Band:
    """Seconds to make one token for each user.

    Args:
        load: users and the context each of them holds.
    """
    users, context = load
    peak = 1e12 * gpu.tflops(compute_type(model, fmt)) * tp
    weights = _seconds(decode_read(model, fmt, tp, users) / (gpu.bandwidth * 1e12), WEIGHT_EFFICIENCY)
    compute = _seconds(2 * active_parameters(model) * users / peak, MFU)
    bound = Band(*(max(pair) for pair in zip(_triple(weights), _triple(compute), strict=True)))
    per_user = sum(n * _read_bytes(layer, kv, context) for layer, n in attention_layers(model, tp).items())
    return bound + _seconds(users * per_user / (gpu.bandwidth * 1e12), KV_EFFICIENCY)


def _read_bytes(layer: Layer, kv: KvFormat, context: int) -> int:
    """Bytes attention reads of one user's cache: the window only, and a recurrent state both read and written."""
    if layer.state:
        return 2 * layer.state
    return layer.token_bytes(kv) * (min(layer.window, context) if layer.window else context)


def speed(model: Model, fmt: str, kv: KvFormat, *, gpu: Gpu, tp: int, load: tuple[int, int, int]) -> Speed:
    """TTFT with an empty queue, and TPOT and throughput of a server that always holds the same number of users.

    Args:
        load: users, tokens of a prompt, tokens of an answer.
    """
    users, prompt, answer = load
    first = prefill(model, fmt, gpu, tokens=prompt, tp=tp)
    step = decode_step(model, fmt, kv, gpu=gpu, tp=tp, load=(users, prompt + answer))
    tpot = step + first.rising(lambda seconds: seconds * users / answer)
    return Speed(first, tpot, Band(users / tpot.high, users / tpot.best, users / tpot.low))
