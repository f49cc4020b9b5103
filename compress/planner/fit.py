"""Does this checkpoint, as it is written, hold so many users on that GPU?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.errors import InputError
from compress.planner.band import Band
from compress.planner.formats import KV_FORMATS
from compress.planner.model import model_of
from compress.planner.options import Ask, nearest
from compress.planner.plan import evaluate, setting
from compress.planner.weights import STORED

if TYPE_CHECKING:
    from compress.checkpoint import Checkpoint

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


def fits(checkpoint: "Checkpoint", *, gpu: str, users: int, context: int, kv: str = "bf16", tp: int = 1) -> FitReport:
    """Compare a checkpoint's own bytes with one kind of GPU.

    Args:
        checkpoint: config and headers; the files need not have been written yet.
        gpu: a name of `gpus.GPUS`.
        users, context: requests held at the same time, and tokens of each.
        kv: a name of `formats.KV_FORMATS`.

    Raises:
        InputError: a name that is not known, or a checkpoint that cannot be planned for.
    """
    if kv not in KV_FORMATS:
        raise nearest("KV format", kv, list(KV_FORMATS))
    row = evaluate(setting(model_of(checkpoint), Ask(gpu, users, context, tp=tp)), STORED, KV_FORMATS[kv], tp)
    if row is None:
        raise InputError(f"no engine keeps the latent cache of {checkpoint.path} as {kv}: use bf16 or fp8")
    verdict = _verdict(row.users, users)
    low, best, high = (f"{count:.0f}" for count in (row.users.low, row.users.best, row.users.high))
    held = best if low == high else f"{best} ({low} to {high})"
    sentence = f"{verdict}: holds {held} users of {context} tokens with {kv} KV, {users} asked for"
    return FitReport(verdict, row.weights_gpu, row.room, row.users, row.context, sentence)


def _verdict(held: Band, users: int) -> str:
    if held.low >= users:
        return "fits"
    return "uncertain" if held.high >= users else "does not fit"
