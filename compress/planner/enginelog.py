"""The few start-up lines of vLLM that say where the memory went, in every wording since V0.

Left out: everything else in the log. `KV cache size` in tokens is used only when no GiB and no concurrency are there:
for models with layers of several kinds it is not bytes divided by bytes per token.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from compress.errors import InputError

__all__ = ["EngineLog", "parse_log"]

NUMBER = r"(-?[\d.,]*\d)"
PATTERNS = {
    "kv": (
        rf"Available KV cache memory: {NUMBER} GiB",
        rf"reserved for KV Cache is {NUMBER} ?GiB",
    ),
    "weights": (
        rf"Model loading took {NUMBER} ?GiB",
        rf"[Mm]odel weights take {NUMBER} ?GiB",
        rf"{NUMBER} GiB for weight",
    ),
    "tokens": (rf"KV cache size: {NUMBER} tokens",),
    "blocks": (rf"# (?:GPU|CUDA|cuda) blocks: {NUMBER}",),
}
CONCURRENCY = re.compile(rf"[Mm]aximum concurrency for {NUMBER} tokens per request: {NUMBER}x")
BLOCK = 16  # tokens of the blocks that V0 counted


@dataclass(frozen=True)
class EngineLog:
    """What a log says; None where it is silent. GiB, tokens, and (tokens per request, times)."""

    kv: float | None
    weights: float | None
    tokens: float | None
    concurrency: tuple[int, float] | None


def parse_log(text: str) -> EngineLog:
    """Read start-up lines, given as text or as the path of a log file.

    Raises:
        InputError: no line that says how much the KV cache got.
    """
    if "\n" not in text and len(text) < 1000 and Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8", errors="replace")
    found = {name: _first(patterns, text) for name, patterns in PATTERNS.items()}
    blocks = found["blocks"]
    tokens = found["tokens"] if blocks is None else blocks * BLOCK
    match = CONCURRENCY.search(text)
    concurrency = (int(_number(match[1])), _number(match[2])) if match else None
    log = EngineLog(found["kv"], found["weights"], tokens, concurrency)
    if log.kv is None and not log.tokens and log.concurrency is None:
        raise InputError(
            "log= holds no line that says how much memory the KV cache got: paste the engine's line "
            "'Available KV cache memory: ... GiB' or 'GPU KV cache size: ... tokens'"
        )
    return log


def _first(patterns: tuple[str, ...], text: str) -> float | None:
    matches = (re.search(pattern, text) for pattern in patterns)
    return next((_number(match[1]) for match in matches if match), None)


def _number(text: str) -> float:
    return float(text.replace(",", ""))
