"""What pruning loses, by method and by how much is pruned, before anything is trained again.

    python benchmarks/pruning.py MODEL [--ratios 5 10 20] [--methods random activation obs] [--axes ffn]
                                 [--documents 24] [--problems 40] [--samples 32] [--work FOLDER]
                                 [--torch-pruning PYTHON] [--importance magnitude taylor]

Every variant goes through the prune stage of a run and is loaded from its files. Each row: parameters, KL from the
source, perplexity, excess log-perplexity in nats per token, NLL of worked solutions, tokens per second of reading 512
tokens and of writing 32, and the seconds of the stage. A variant that has been written to --work is measured again, not
pruned again; further checkpoints of the same tokenizer (a distilled one, or another tool's) are named by --also. With
--torch-pruning, the Python of an environment that has it, its rows come with the same widths and calibration tokens.
"""

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # evals.py beside this file would hide the package

from compress.calibration import calibration_tokens
from compress.checkpoint import Checkpoint
from compress.head import read_head
from compress.progress import step
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
from evals.samples import SampleSet, load_samples
from evals.score import Reference, Row, score
from evals.windows import Encoded, encode
from quant.loader import LoadedModel, load_model

HEADINGS = ("variant", "params", "KL", "ppl", "excess nats", "math NLL", "read tok/s", "write tok/s", "seconds")
WORKER = Path(__file__).parent / "pruning_workers" / "with_torch_pruning.py"
LENGTH = 1024
WRITTEN = 32


@dataclass(frozen=True)
class Measure:
    """One variant's row, beside the source's."""

    params: int
    kl: float
    nll: float
    math: float
    reading: float
    writing: float


class Judge:
    """Holds the source's scores on the samples."""

    def __init__(self, path: Path, sets: Sequence[SampleSet]) -> None:
        loaded = load_model(path)
        self.encoded = [encode(loaded.tokenizer, found, max_length=LENGTH, max_tokens=192) for found in sets]
        found = [score(loaded.model, encoded, keep_states=True) for encoded in self.encoded]
        head = read_head(loaded.model)
        self.references = [
            Reference(scores.states, head, tuple(sample.hash for sample in encoded))
            for scores, encoded in zip(found, self.encoded, strict=True)
            if scores.states is not None
        ]
        self.source = self._measure(loaded)

    def measure(self, path: Path) -> Measure:
        """Load a checkpoint and score it."""
        return self._measure(load_model(path))

    def _measure(self, loaded: LoadedModel) -> Measure:
        pairs = zip(self.encoded, self.references, strict=True)
        text, problems = (score(loaded.model, samples, reference=reference).rows for samples, reference in pairs)
        params = sum(parameter.numel() for parameter in loaded.model.parameters())
        reading, writing = speeds(loaded, self.encoded[0])
        return Measure(params, _mean(text, "kl"), _mean(text, "nll"), _mean(problems, "nll"), reading, writing)


def _mean(rows: Sequence[Row], key: str) -> float:
    return float(sum(row[key] for row in rows) / sum(row["tokens"] for row in rows))


@torch.inference_mode()
def speeds(loaded: LoadedModel, encoded: Sequence[Encoded]) -> tuple[float, float]:
    """Tokens per second of a prompt of up to 512 tokens and of greedy generation after one token; best of three."""
    ids = torch.tensor([[token for sample in encoded for window in sample.windows for token in window.ids][:512]])

    def rate(tokens: int, call: object) -> float:
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            call()  # type: ignore[operator]
            best = min(best, time.perf_counter() - start)
        return tokens / best

    def write() -> None:
        loaded.model.generate(
            ids[:, :1], max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False, pad_token_id=0
        )

    return rate(ids.numel(), lambda: loaded.model(ids)), rate(WRITTEN, write)


def prune(source: Path, stage: dict[str, object], folder: Path, sets: Sequence[SampleSet]) -> tuple[Path, float]:
    """Run a prune stage, unless its folder is there; the checkpoint and the seconds it took."""
    checkpoint = Checkpoint.open(source)
    (plan,) = plan_stages([Stage.model_validate({"prune": stage})], checkpoint, Place(folder, 5 * 10**9, sets))
    start = time.monotonic()
    if not plan.result.path.exists():
        with step(f"{folder.name}: {plan.summary}", checkpoint.nbytes) as advance:
            run_stage(plan, torch.device("cpu"), advance)
    return plan.result.path, time.monotonic() - start


def peer(options: argparse.Namespace, importance: str, width: int, output: Path, sets: Sequence[SampleSet]) -> float:
    """Let Torch-Pruning write `output`, unless it is there; the seconds it took."""
    if output.exists():
        return 0.0
    tokens = calibration_tokens(
        options.model,
        documents=options.calibration,
        problems="arithmetic",
        size=(options.samples, 512),
        evaluated=sets,
    )
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(tokens, file.name)
        words = [options.model, output, str(width), importance, file.name]
        subprocess.run([options.torch_pruning, WORKER, *words], check=True)
    return time.monotonic() - start


def variants(options: argparse.Namespace, work: Path, sets: Sequence[SampleSet]) -> Iterator[tuple[str, Path, float]]:
    """(name, checkpoint, seconds) of each ratio and method, then of what was made elsewhere."""
    calibration = {"documents": options.calibration, "samples": options.samples, "length": 512}
    for ratio in options.ratios:
        for method in options.methods:
            stage = {
                "target": {"params": f"-{ratio}%"},
                "axes": options.axes,
                "method": method,
                "round_to": options.round_to,
                "calibration": calibration,
            }
            name = f"-{ratio}% {method}"
            path, seconds = prune(options.model, stage, work / f"{'-'.join(options.axes)}-{ratio}-{method}", sets)
            yield name, path, seconds
        for importance in options.importance if options.torch_pruning else []:
            width = Checkpoint.open(path).config["intermediate_size"]
            output = work / f"torch-pruning-{ratio}-{importance}"
            yield f"-{ratio}% Torch-Pruning {importance}", output, peer(options, importance, width, output, sets)
    for path in options.also:
        yield path.name, path, 0.0


def row(name: str, found: Measure, source: Measure, seconds: float) -> tuple[str, ...]:
    """A row of the table."""
    numbers = (found.kl, math.exp(found.nll), found.nll - source.nll, found.math, found.reading, found.writing)
    formats = ("{:.4f}", "{:.2f}", "{:+.4f}", "{:.4f}", "{:.0f}", "{:.1f}")
    texts = [text.format(number) for text, number in zip(formats, numbers, strict=True)]
    return (name, f"{found.params / 1e6:.1f} M", *texts, f"{seconds:.0f}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--ratios", nargs="+", default=["5", "10", "20"], help="percent of parameters")
    parser.add_argument("--methods", nargs="+", default=["random", "activation", "obs"])
    parser.add_argument("--axes", nargs="+", default=["ffn"])
    parser.add_argument("--round-to", type=int, default=128)
    parser.add_argument("--documents", type=int, default=24, help="texts that are scored, of 192 tokens")
    parser.add_argument("--problems", type=int, default=40, help="worked solutions that are scored")
    parser.add_argument("--source", default="python-docs", help="of the texts: a name or a file")
    parser.add_argument("--calibration", default="python-docs", help="texts to calibrate on: a name or a file")
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences of 512 tokens")
    parser.add_argument("--torch-pruning", metavar="PYTHON", help="of an environment that has it: its rows too")
    parser.add_argument("--importance", nargs="+", default=["magnitude", "taylor"], help="of Torch-Pruning")
    parser.add_argument("--also", nargs="*", type=Path, default=[], help="further checkpoints to measure")
    parser.add_argument("--work", type=Path, help="keep the variants here")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    options = arguments()
    sets = [
        load_samples("text", kind="documents", source=options.source, count=options.documents),
        load_samples("math", kind="problems", source="arithmetic", count=options.problems),
    ]
    judge = Judge(options.model, sets)
    table = Table(*HEADINGS)
    table.add_row(*row("source", judge.source, judge.source, 0))
    with tempfile.TemporaryDirectory() as folder:
        for name, path, seconds in variants(options, options.work or Path(folder), sets):
            table.add_row(*row(name, judge.measure(path), judge.source, seconds))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
