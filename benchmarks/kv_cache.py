"""Every KV-cache scheme on long documents: perplexity, divergence from the exact cache, and next tokens that stay.

    python benchmarks/kv_cache.py [--model demo] [--data python-docs] [--documents 4] [--tokens 2048] [--schemes S ...]

`--data` is a source of documents as in a recipe, or a path; each document is read in one window, through the quantized
cache. Static scales are calibrated on texts that are not measured; "cast" is the scale 1. The divergence is that of a
cache that computes exactly what is stored; an engine's own kernels may lose more (vLLM's on a processor lost 2.4% of
perplexity with FP8 where this gives 1%).
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from compress.calibration import calibration_texts
from compress.checkpoint import Checkpoint
from compress.head import read_head
from compress.source import fetch_source
from evals.samples import SampleSet, load_samples
from evals.score import Reading, Reference, Row, score
from evals.windows import Encoded, encode
from quant.kv.cache import KvEmulation, Scales
from quant.kv.calibrate import find_scales
from quant.kv.layers import attention_layers
from quant.kv.plan import plan_kv_cache
from quant.kv.schemes import KvScheme, make_scheme
from quant.kv.stored import scale_names
from quant.loader import LoadedModel, load_model

# what is measured: name -> scheme, and whether its static scales are calibrated
SCHEMES: Mapping[str, tuple[KvScheme, bool]] = {
    "int8": (make_scheme("int8"), False),
    "fp8": (make_scheme("fp8"), True),
    "fp8-cast": (make_scheme("fp8"), False),
    "fp8-head": (make_scheme("fp8", granularity="head"), True),
    "int4": (make_scheme("int4"), False),
    "int4-residual128": (make_scheme("int4", residual=128), False),
    "int4-token": (make_scheme("int4-token"), False),
    "nvfp4": (make_scheme("nvfp4"), False),
}
WORDS_PER_TOKEN = 0.65  # of English text with code, so that a document is long enough
BATCH_TOKENS = 8192


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo", help="demo, directory, .gguf file or hub id")
    parser.add_argument("--data", default="python-docs", help="source of documents")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each document, read in one window")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    given = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    directory = fetch_source(given.model, say=lambda _: None)
    loaded = load_model(directory, device="cuda" if torch.cuda.is_available() else "cpu")
    encoded, texts = _texts(loaded, given)
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(
        "scheme", "bits", "perplexity", "growth", "KL", "same top-1", "seconds", title=f"{len(encoded)} documents"
    )
    for cells in _measure(loaded, directory, encoded, texts, given.schemes):
        console.print(*cells)
        table.add_row(*cells)
    console.print(table)


def _texts(loaded: LoadedModel, given: argparse.Namespace) -> tuple[list[Encoded], list[str]]:
    """The longest documents, cut, and calibration texts that share nothing with them."""
    words = int(given.tokens * WORDS_PER_TOKEN)
    found = load_samples("long", kind="documents", source=given.data, options={"words": words})
    all_encoded = encode(loaded.tokenizer, found, max_length=given.tokens, max_tokens=given.tokens)
    long = [sample for sample in all_encoded if sample.tokens == given.tokens][: given.documents]
    chosen = {sample.id for sample in long}
    measured = SampleSet("long", "documents", given.data, "", tuple(s for s in found.samples if s.id in chosen))
    return long, [*itertools.islice(calibration_texts("python-docs", "arithmetic", [measured]), 32)]


def _measure(
    loaded: LoadedModel, directory: Path, encoded: list[Encoded], texts: list[str], names: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    started = time.perf_counter()
    exact = score(loaded.model, encoded, reading=Reading(BATCH_TOKENS), keep_states=True)
    yield "exact", "16", *_figures(exact.rows, exact.rows), f"{time.perf_counter() - started:.0f}"
    assert exact.states is not None
    reference = Reference(exact.states, read_head(loaded.model), tuple(sample.hash for sample in encoded))
    for name in names:
        scheme, calibrated = SCHEMES[name]
        scales = _scales(directory, scheme, texts if calibrated else None)
        emulation = KvEmulation(scheme, loaded.model.config, scales)
        started = time.perf_counter()
        found = score(loaded.model, encoded, reading=Reading(BATCH_TOKENS, emulation.make_cache), reference=reference)
        dim = next(iter(attention_layers(Checkpoint.open(directory)).values())).head_dim
        seconds = f"{time.perf_counter() - started:.0f}"
        yield name, f"{scheme.bits(dim):g}", *_figures(found.rows, exact.rows), seconds


def _scales(directory: Path, scheme: KvScheme, texts: list[str] | None) -> dict[int, Scales]:
    plan = plan_kv_cache(Checkpoint.open(directory), scheme, max_shard_size=1 << 40)
    found = find_scales(plan, texts, max_tokens=2048, device=torch.device("cpu"))
    return {
        layer: Scales(*(found.get(name) for name in scale_names(attention))) for layer, attention in plan.layers.items()
    }


def _figures(rows: Sequence[Row], exact: Sequence[Row]) -> tuple[str, str, str, str]:
    """Perplexity, its growth, KL in nats per token, and how often the most likely token stays."""
    tokens = sum(row["tokens"] for row in rows)
    nll, before = (sum(row["nll"] for row in side) / tokens for side in (rows, exact))
    compared = "kl" in rows[0]
    kl = f"{sum(row['kl'] for row in rows) / tokens:.4f}" if compared else "0"
    agree = f"{sum(row['agree'] for row in rows) / tokens:.3f}" if compared else "1"
    return f"{exp(nll):.3f}", f"{100 * (exp(nll - before) - 1):+.2f}%", kl, agree


if __name__ == "__main__":
    main()
