"""Quality of our methods and of other tools' at equal bits, side by side: one row a tool, a format and a method.

    python benchmarks/quality.py SOURCE FOLDER --documents WIKI.jsonl --problems TEST.jsonl
        --calibration-problems TRAIN.jsonl [--samples 128] [--length 512] [--peer llmc=ENV/bin/python ...]
        [--rows 'ours/int4-g64/*' ...]

Everyone gets the same calibration tokens: documents that the evaluation leaves over, problems, and problems as chat.
Every row is a process of its own (`quality_workers/`), for peers in their own environments. What it wrote is loaded by
our loader and scored by the gate's scoring on the same samples, with the divergence from the source. Rows are kept in
FOLDER as they are done, so that they can be made one at a time; the table has all that are there. Rows of peers whose
environment is not given are left out.

For a source off any grid, run `off_grid.py` first. Bits per weight count everything that is stored for the linears.
Seconds are of the processor, not of the clock: the peers' imports are left out, loading and saving are not.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # evals.py beside this file would hide the package

import torch
from safetensors.torch import load_file, save_file

from compress.calibration import calibration_tokens
from compress.checkpoint import Checkpoint
from compress.head import load_head, read_head, save_head
from compress.request import read_rows, write_rows
from compress.writer import write_json
from evals.samples import SampleSet, load_samples
from evals.score import Reference, score
from evals.windows import encode
from quant.loader import load_model

WORKERS = Path(__file__).parent / "quality_workers"
MAX_TOKENS = 512  # of a document
MAX_LENGTH = 2048
OURS = ("rtn", "search", "gptq", "awq", "awq-gptq", "awq-gptaq")
FORMATS: dict[str, dict[str, Any]] = {
    "int4-g64": {"format": "int4", "group_size": 64},
    "int4-g32": {"format": "int4", "group_size": 32},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
    "fp8": {"format": "fp8"},
    "int8": {"format": "int8"},
}


@dataclass(frozen=True)
class Row:
    """A tool's worker, the format it writes, and how it chooses codes."""

    tool: str
    format: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.tool}/{self.format}/{self.method}"


ROWS = (
    *(Row("ours", name, method, options) for name, options in FORMATS.items() for method in OURS),
    *(
        Row("ours", name, f"learned-{n}-iterations", {**FORMATS[name], "method": "learned", "iterations": n})
        for name in ("int4-g64", "int4-g32", "mxfp4", "nvfp4")
        for n in (16, 50, 200)
    ),
    *(Row("llmc", "int4-g64", method, {"group_size": 64}) for method in ("rtn", "gptq", "awq")),
    *(Row("llmc", "int4-g32", method, {"group_size": 32}) for method in ("rtn", "gptq", "awq")),
    Row("llmc", "mxfp4", "rtn", {"scheme": "MXFP4A16"}),
    Row("llmc", "mxfp4", "gptq", {"scheme": "MXFP4A16"}),
    Row("llmc", "nvfp4", "rtn", {"scheme": "NVFP4A16"}),
    Row("llmc", "nvfp4", "gptq", {"scheme": "NVFP4A16"}),
    Row("llmc", "fp8", "rtn", {"scheme": "FP8_DYNAMIC"}),
    Row("llmc", "int8", "rtn", {"scheme": "W8A8"}),
    Row("llmc", "int8", "smooth-gptq", {"scheme": "W8A8"}),
    *(
        Row("autoround", f"int4-g{size}", f"{iterations}-iterations", {"group_size": size, "iterations": iterations})
        for size in (64, 32)
        for iterations in (0, 16, 50, 200)
    ),
    *(Row("autoround", "mxfp4", f"{n}-iterations", {"scheme": "MXFP4", "iterations": n}) for n in (0, 50, 200)),
    Row("gptqmodel", "int4-g64", "gptq", {"group_size": 64}),
    Row("gptqmodel", "int4-g32", "gptq", {"group_size": 32}),
    Row("hqq", "int4-g64", "hqq", {"group_size": 64}),
    Row("hqq", "int4-g32", "hqq", {"group_size": 32}),
    Row("bnb", "nf4", "nf4", {"group_size": 64}),
    Row("llama_cpp", "gguf", "Q4_0"),
    Row("llama_cpp", "gguf", "Q4_K_M"),
)


@dataclass(frozen=True)
class Bench:
    """Where everything lies, and what all rows have in common."""

    source: Path
    folder: Path
    sets: tuple[SampleSet, ...]
    calibration: dict[str, Any]  # documents, problems, samples, length

    @property
    def tokens(self) -> Path:
        """The calibration tokens, made once."""
        file = self.folder / "tokens.pt"
        if not file.exists():
            size = self.calibration["samples"], self.calibration["length"]
            sources = {key: self.calibration[key] for key in ("documents", "problems")}
            torch.save(calibration_tokens(self.source, **sources, size=size, evaluated=self.sets), file)
        return file


def make(bench: Bench, row: Row, python: str, target: Path) -> dict[str, Any]:
    """Run the row's worker; what it took: cpu_seconds, peak_bytes, and bits where only it can tell."""
    request = {
        "source": str(bench.source),
        "target": str(target),
        "tokens": str(bench.tokens),
        "method": row.method,
        "options": row.options,
        "calibration": bench.calibration,
        "sets": {found.kind: [found.source, len(found.samples)] for found in bench.sets},
    }
    write_json(target.with_suffix(".json"), request)
    subprocess.run([python, str(WORKERS / f"with_{row.tool}.py"), str(target.with_suffix(".json"))], check=True)
    found: dict[str, Any] = json.loads((target / "made.json").read_text())
    return found


def bits(checkpoint: Checkpoint, linears: Mapping[str, int]) -> float:
    """Bits per weight of everything stored under the names of the source's linears."""
    stored = sum(8 * info.nbytes for name, info in checkpoint.tensors.items() if name.rpartition(".")[0] in linears)
    return stored / sum(linears.values())


def linears(source: Checkpoint) -> dict[str, int]:
    """The number of weights of each matrix inside the decoder blocks."""
    matrices = {name: info for name, info in source.tensors.items() if ".layers." in name and len(info.shape) == 2}
    return {name.removesuffix(".weight"): math.prod(info.shape) for name, info in matrices.items()}


def evaluate(bench: Bench, directory: Path) -> dict[str, float]:
    """nll and, but for the source itself, kl of every sample set, per token in nats."""
    kept = bench.folder / "source"
    kept.mkdir(exist_ok=True)
    loaded = load_model(directory)
    found: dict[str, float] = {}
    for samples in bench.sets:
        encoded = encode(loaded.tokenizer, samples, max_length=MAX_LENGTH, max_tokens=MAX_TOKENS)
        if directory == bench.source:
            scores = score(loaded.model, encoded, keep_states=True)
            save_file({"states": scores.states}, kept / f"{samples.kind}.safetensors")
            write_rows(kept / f"{samples.kind}.jsonl", scores.rows)
            save_head(read_head(loaded.model), kept / "head.safetensors")
        else:
            scores = score(loaded.model, encoded, reference=_reference(kept, samples.kind))
        tokens = sum(row["tokens"] for row in scores.rows)
        for measure in {"nll", "kl"} & scores.rows[0].keys():
            found[f"{samples.kind}_{measure}"] = sum(row[measure] for row in scores.rows) / tokens
    return found


def _reference(kept: Path, kind: str) -> Reference:
    hashes = tuple(row["hash"] for row in read_rows(kept / f"{kind}.jsonl"))
    states = load_file(kept / f"{kind}.safetensors")["states"]
    return Reference(states, load_head(kept / "head.safetensors", device=torch.device("cpu")), hashes)


def run(bench: Bench, row: Row, python: str) -> None:
    """Make, measure and keep one row."""
    target = bench.folder / "made" / row.name.replace("/", "_")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    made = make(bench, row, python, target)
    made.setdefault("bits", bits(Checkpoint.open(target), linears(Checkpoint.open(bench.source))))
    result = {"name": row.name, **made, **evaluate(bench, target)}
    write_json(bench.folder / "rows" / f"{row.name.replace('/', '_')}.json", result)
    shutil.rmtree(target)
    print(line(result), flush=True)


HEADER = (
    "| tool | format | method | bits | perplexity | KL | problems' NLL | problems' KL | CPU s | peak MB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def line(result: Mapping[str, Any]) -> str:
    """A row of the table."""
    cells = [
        *result["name"].split("/"),
        f"{result['bits']:.2f}",
        f"{math.exp(result['documents_nll']):.2f}",
        f"{result['documents_kl']:.4f}" if "documents_kl" in result else "–",
        f"{result['problems_nll']:.4f}",
        f"{result['problems_kl']:.4f}" if "problems_kl" in result else "–",
        f"{result['cpu_seconds']:.0f}",
        f"{result['peak_bytes'] / 1e6:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def show(bench: Bench) -> None:
    """All rows that are there, by format and then by divergence."""
    files = sorted((bench.folder / "rows").glob("*.json"))
    found = [json.loads(file.read_text()) for file in files]
    print(HEADER)
    for result in sorted(found, key=lambda row: (row["name"].split("/")[1], row.get("documents_kl", 0))):
        print(line(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", default="python-docs", help="source of documents; the rest of it calibrates")
    parser.add_argument("--problems", default="arithmetic", help="source of evaluation problems")
    parser.add_argument("--calibration-problems", default="arithmetic", help="source of calibration problems")
    parser.add_argument("--counts", type=int, nargs=2, default=(16, 60), help="documents and problems to evaluate")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--peer", action="append", default=[], metavar="TOOL=PYTHON")
    parser.add_argument("--rows", nargs="*", default=["*"], help="patterns of TOOL/FORMAT/METHOD")
    return parser.parse_args()


def main() -> None:
    """Make what is missing of the rows asked for; print the table."""
    options = parse()
    documents, problems = options.counts
    sets = (
        load_samples("documents", kind="documents", source=options.documents, count=documents),
        load_samples("problems", kind="problems", source=options.problems, count=problems),
    )
    calibration = {"documents": options.documents, "problems": options.calibration_problems}
    calibration |= {"samples": options.samples, "length": options.length}
    bench = Bench(options.source.resolve(), options.folder.resolve(), sets, calibration)
    (bench.folder / "rows").mkdir(parents=True, exist_ok=True)
    pythons = dict(peer.split("=", 1) for peer in options.peer) | {"ours": sys.executable}
    if not (bench.folder / "rows" / "source.json").exists():
        source = {"name": "source/bf16/–", "bits": 16.0, "cpu_seconds": 0, "peak_bytes": 0}
        write_json(bench.folder / "rows" / "source.json", source | evaluate(bench, bench.source))
    for row in ROWS:
        wanted = any(fnmatch(row.name, pattern) for pattern in options.rows) and row.tool in pythons
        if wanted and not (bench.folder / "rows" / f"{row.name.replace('/', '_')}.json").exists():
            run(bench, row, pythons[row.tool])
    show(bench)


if __name__ == "__main__":
    main()
