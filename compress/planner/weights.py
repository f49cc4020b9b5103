"""Bytes of a model's weights in each format: on disk, in one GPU's memory, and read in one step.

Only the matrices of the decoder take a format; embeddings, head, norms, routers and vision towers stay in 16 bits. All
experts are resident, whatever a token visits. Tensor parallelism divides matrices, embedding and head; the small rest
is on every GPU. "stored" is the checkpoint as it is.
"""

from math import ceil, prod

from compress.planner.band import Band
from compress.planner.formats import WEIGHT_FORMATS
from compress.planner.inventory import Weight
from compress.planner.model import Model

__all__ = ["STORED", "active_parameters", "compute_type", "decode_read", "loaded", "nbytes", "on_gpu", "share"]

STORED = "stored"
QUANTIZED = {"linear", "expert"}
SPLIT = {"linear", "expert", "embedding", "head"}
# engines pad MXFP4 experts for their kernels: (rows to, columns to) that the least and the most greedy backend want
PAD = {"best": (256, 1), "high": (256, 128)}


def nbytes(weight: Weight, fmt: str) -> int:
    """Bytes of one matrix in a format."""
    if fmt == STORED:
        return weight.stored
    if weight.scale:
        return 0
    if weight.role in QUANTIZED:
        return WEIGHT_FORMATS[fmt].nbytes(*weight.shape)
    return 2 * prod(weight.shape)


def loaded(model: Model, fmt: str) -> int:
    """Bytes of everything an engine loads."""
    return sum(weight.count * nbytes(weight, fmt) for weight in model.weights if weight.role != "mtp")


def on_gpu(model: Model, fmt: str, tp: int) -> Band:
    """Bytes in the memory of one of `tp` GPUs, padding of MXFP4 experts included."""
    total = sum(
        weight.count * nbytes(weight, fmt) / (tp if weight.role in SPLIT else 1)
        for weight in model.weights
        if weight.role != "mtp"
    )
    best, high = (_padding(model, fmt, tp, *PAD[bound]) for bound in ("best", "high"))
    return Band(total, total + best, total + high)


def _padding(model: Model, fmt: str, tp: int, hidden_to: int, width_to: int) -> float:
    """Bytes that engines add to MXFP4 experts on one GPU: hidden and expert width rounded up."""
    if not _is_mxfp4(model, fmt):
        return 0.0
    experts = sum(weight.count * nbytes(weight, fmt) for weight in model.weights if weight.role == "expert") / tp
    hidden, width = model.get("hidden_size"), model.get("moe_intermediate_size", "intermediate_size") / tp
    grown = ceil(hidden / hidden_to) * hidden_to / hidden * (ceil(width / width_to) * width_to / width)
    return experts * (grown - 1)


def _is_mxfp4(model: Model, fmt: str) -> bool:
    return fmt == "mxfp4" or (fmt == STORED and model.quantized == "mxfp4")


def share(model: Model, batch: float) -> float:
    """Expected share of a layer's experts that `batch` tokens visit, routing taken as uniform."""
    return 1 - (1 - model.experts_per_token / model.experts) ** batch if model.experts else 1.0


def decode_read(model: Model, fmt: str, tp: int, batch: float) -> float:
    """Bytes of weights one GPU reads to make one token for each of `batch` users.

    An embedding table is looked up, not read, unless it is the head too.
    """
    tied = not any(weight.role == "head" for weight in model.weights)
    total = 0.0
    for weight in model.weights:
        if weight.role in ("mtp", "vision") or (weight.role == "embedding" and not tied):
            continue
        part = share(model, batch) if weight.role == "expert" else 1.0
        total += part * weight.count * nbytes(weight, fmt) / (tp if weight.role in SPLIT else 1)
    return total


def active_parameters(model: Model) -> float:
    """Parameters that multiply one token of a prompt: without embeddings, head and experts it does not visit."""
    return sum(
        weight.numel * (share(model, 1) if weight.role == "expert" else 1)
        for weight in model.weights
        if weight.role in QUANTIZED or weight.role == "router"
    )


def compute_type(model: Model, fmt: str) -> str:
    """The type in which a format's matrices are multiplied, see `Gpu.tflops`; as stored, 8-bit weights in 8 bits."""
    if fmt != STORED:
        return WEIGHT_FORMATS[fmt].compute
    matrices = [weight for weight in model.weights if weight.role in QUANTIZED]
    bits = (
        8 * sum(weight.count * weight.stored for weight in matrices) / max(1, sum(weight.numel for weight in matrices))
    )
    return "fp8" if 7.5 < bits < 9 else "bf16"
