"""Our scoring beside lm-eval's own Hugging Face loop: the same model, texts, windows and dtype, in turn, in one run.

    python benchmarks/evals.py [--model demo] [--documents 6] [--problems 24] [--rounds 2] [--auto]

Prints for documents (rolling NLL) and problems (NLL of the solution) the seconds of each, wall and processor, their
ratio to ours, and the largest relative difference of a sample's sum. lm-eval gets batch sizes 1 (its default) and 8.
Both sides tokenize within the time; loading the model is outside. "ours with KL" has the source's states at hand and
gives KL and top-1 agreement as well, for which lm-eval has no counterpart. `--auto` adds lm-eval as its command line
loads the model, in the dtype of the checkpoint, on one sample, scaled by tokens: bfloat16 is slow on most processors.

On a processor both sides spend nine tenths of the time in the same matrix products, so the ratio says little about the
rest; it grows with the vocabulary, the padding and the share of the questions, and on an accelerator.
"""

import argparse
import io
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # before tqdm is imported: it reads its settings once
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # else this file hides the package of the same name

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from compress.head import read_head
from compress.source import fetch_source
from evals.samples import SampleSet, load_samples
from evals.score import Reading, Reference, score
from evals.windows import encode, total_tokens

LENGTH = 512  # window of both
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Sums = list[float]
console = Console(width=None if sys.stdout.isatty() else 130)


@dataclass(frozen=True)
class Contestant:
    """A name, a run that returns the NLL of each sample, and the share of the tokens it is run on."""

    name: str
    run: Callable[[], Sums]
    share: float = 1.0


@dataclass
class Best:
    """The shortest run of a contestant, in seconds for all tokens, and its sums."""

    wall: float = math.inf
    processor: float = math.inf
    sums: Sums = field(default_factory=list)

    def add(self, contestant: Contestant) -> None:
        """Run once more."""
        wall, processor = time.perf_counter(), time.process_time()
        self.sums = contestant.run()
        self.wall = min(self.wall, (time.perf_counter() - wall) / contestant.share)
        self.processor = min(self.processor, (time.process_time() - processor) / contestant.share)


def main() -> None:
    """Measure both kinds of samples and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="demo, a directory, or a hub id")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--auto", action="store_true", help="also as lm-eval loads the model")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    disable_progress_bar()
    path = fetch_source(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE).eval()
    sets = (
        load_samples("documents", kind="documents", source="python-docs", count=options.documents, seed=1),
        load_samples("problems", kind="problems", source="arithmetic", count=options.problems, seed=1),
    )
    table = Table("samples", "run", "seconds", "processor", "ms/token", "ratio", "ratio (processor)", "sums differ by")
    for samples in sets:
        contestants = _contestants(model, tokenizer, samples)
        contestants += _loaded(path, tokenizer, samples) if options.auto else []
        for row in compare(contestants, _tokens(tokenizer, samples), options.rounds):
            table.add_row(f"{len(samples.samples)} {samples.name}", *row)
    console.print(f"{path.name}, {DEVICE}, {torch.get_num_threads()} threads, float32, windows of {LENGTH} tokens")
    console.print(table)


def compare(contestants: list[Contestant], tokens: int, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the table: the best of `rounds` runs of each contestant, in turn, beside the first."""
    best = {contestant.name: Best() for contestant in contestants}
    for _ in range(rounds):
        for contestant in contestants:
            best[contestant.name].add(contestant)
    ours = best[contestants[0].name]
    return [
        (
            name,
            f"{found.wall:.1f}",
            f"{found.processor:.1f}",
            f"{1000 * found.processor / tokens:.2f}",
            f"{found.wall / ours.wall:.2f}",
            f"{found.processor / ours.processor:.2f}",
            f"{max(abs(a / b - 1) for a, b in zip(found.sums, ours.sums, strict=False)):.1e}",
        )
        for name, found in best.items()
    ]


def _tokens(tokenizer: PreTrainedTokenizerBase, samples: SampleSet) -> int:
    return total_tokens(encode(tokenizer, samples, max_length=LENGTH, add_bos=False))


def _contestants(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: SampleSet) -> list[Contestant]:
    encoded = encode(tokenizer, samples, max_length=LENGTH, add_bos=False)
    kept = score(model, encoded, keep_states=True).states  # warms up as well
    assert kept is not None
    reference = Reference(kept, read_head(model), tuple(sample.hash for sample in encoded))
    return [
        Contestant("ours", lambda: _ours(model, tokenizer, samples)),
        Contestant("lm-eval, batch size 1", lambda: _peer(model, tokenizer, samples, 1)),
        Contestant("lm-eval, batch size 8", lambda: _peer(model, tokenizer, samples, 8)),
        Contestant("ours with KL", lambda: _ours(model, tokenizer, samples, reference)),
    ]


def _loaded(path: Path, tokenizer: PreTrainedTokenizerBase, samples: SampleSet) -> list[Contestant]:
    first = replace(samples, samples=samples.samples[:1])
    lm = HFLM(pretrained=str(path), device=DEVICE, max_length=LENGTH, add_bos_token=False)
    share = _tokens(tokenizer, first) / _tokens(tokenizer, samples)
    return [Contestant("lm-eval, dtype auto", lambda: _answers(lm, first), share)]


def _ours(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: SampleSet, reference: Reference | None = None
) -> Sums:
    encoded = encode(tokenizer, samples, max_length=LENGTH, add_bos=False)
    return [row["nll"] for row in score(model, encoded, reading=Reading(2048), reference=reference).rows]


def _peer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: SampleSet, batch_size: int) -> Sums:
    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=LENGTH,
        softmax_dtype="float32",
        add_bos_token=False,
    )
    return _answers(lm, samples)


def _answers(lm: Any, samples: SampleSet) -> Sums:
    kind = {"documents": "loglikelihood_rolling", "problems": "loglikelihood"}[samples.kind]
    arguments = [(s.context, s.target) if samples.kind == "problems" else (s.target,) for s in samples.samples]
    requests = [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]
    with redirect_stderr(io.StringIO()):  # one of its bars cannot be switched off
        answers = getattr(lm, kind)(requests, disable_tqdm=True)
    return [-(answer[0] if isinstance(answer, tuple) else answer) for answer in answers]


if __name__ == "__main__":
    main()
