"""Does this checkpoint, as it is written, hold so many users on that GPU? The `fit:` block of a recipe."""

from dataclasses import dataclass
from pathlib import Path

from compress.errors import InputError
from compress.planner.band import Band
from compress.planner.formats import KV_FORMATS
from compress.planner.model import load_model
from compress.planner.options import Ask, nearest
from compress.planner.plan import evaluate, setting
from compress.planner.weights import STORED

__all__ = ["FitReport", "fits"]


@dataclass(frozen=True)
class FitReport:
    """Whether a checkpoint holds the users asked for, by the engine's highest, likeliest and lowest need.

    verdict   "fits", "uncertain" (only if the engine takes less than it at worst did), or "does not fit"
    weights   bytes on one GPU
    room      bytes left for the KV cache; negative: the weights alone do not fit
    held      users held at the context asked for
    context   longest context for the users asked for
    sentence  the same in words
    """

    verdict: str
    weights: Band
    room: Band
    held: Band
    context: Band
    sentence: str


def fits(checkpoint_dir: Path | str, *, gpu: str, users: int, context: int, kv: str = "bf16", tp: int = 1) -> FitReport:
    """Compare a checkpoint's own bytes with one kind of GPU.

    Args:
        checkpoint_dir: a directory with config.json and safetensors.
        gpu: a name of `gpus.GPUS`.
        users, context: requests held at the same time, and tokens of each.
        kv: a name of `formats.KV_FORMATS`.

    Raises:
        InputError: a name that is not known, or a checkpoint that cannot be read or planned.
    """
    if kv not in KV_FORMATS:
        raise nearest("KV format", kv, list(KV_FORMATS))
    model = load_model(str(checkpoint_dir))
    row = evaluate(setting(model, Ask(gpu, users, context, tp=tp)), STORED, KV_FORMATS[kv], tp)
    if row is None:
        raise InputError(f"no engine keeps the latent cache of {checkpoint_dir} as {kv}: use bf16 or fp8")
    verdict = _verdict(row.users, users)
    sentence = (
        f"{verdict}: {row.users.best:.0f} ({row.users.low:.0f}-{row.users.high:.0f}) users of {context} tokens "
        f"with {kv} KV on {tp} x {gpu}, {users} asked for"
    )
    return FitReport(verdict, row.weights_gpu, row.room, row.users, row.context, sentence)


def _verdict(held: Band, users: int) -> str:
    if held.low >= users:
        return "fits"
    return "uncertain" if held.high >= users else "does not fit"
