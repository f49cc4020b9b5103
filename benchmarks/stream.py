"""Speed of data-free quantization against a plain copy of the same files, and against llm-compressor's streaming.

    python benchmarks/stream.py --folder /big/disk [--gigabytes 2] [--peer-python ENV/bin/python]

Makes a synthetic sharded bf16 checkpoint, then in one run and in turn: a read-and-write copy of its files, each format
(compiled, and eager with --eager), and model_free_ptq of the peer for the schemes it has. Printed are medians over the
rounds and the ratio to the copy; compilation is timed apart, by a first pass over one layer. Everything is made durable
(fsync) on both sides.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from compress.checkpoint import Checkpoint
from compress.tensor_file import Spec
from compress.writer import ShardWriter, plan_shards, write_json
from quant.options import Quantize
from quant.plan import plan_quantize
from quant.stream import run_streaming

HIDDEN, FFN, VOCAB, HEADS = 2048, 5632, 32000, 32
CHUNK = 16 << 20
FORMATS: dict[str, dict[str, object]] = {
    "fp8": {},
    "fp8-block": {},
    "int8": {},
    "int4": {"group_size": 128},
    "mxfp4": {},
    "mxfp8": {},
    "nvfp4": {},
}
PEER = {
    "fp8": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "mxfp4": "MXFP4A16",
    "nvfp4": "NVFP4A16",
    "int4": "W4A16",
    "int8": "W8A8",
}
PEER_CODE = """
import sys, time
from llmcompressor import model_free_ptq
start = time.monotonic()
source, target, scheme = sys.argv[1:]
model_free_ptq(source, target, scheme=scheme, ignore=["lm_head"], max_workers=2, device="cpu")
print("seconds", time.monotonic() - start)
"""


def make_source(folder: Path, gigabytes: float) -> Path:
    """A Llama-shaped checkpoint of about this size with heavy-tailed weights, in shards of 500 MB."""
    target = folder / "source"
    per_layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * VOCAB * HIDDEN) / per_layer))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"model.layers.{i}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"model.layers.{i}.mlp.gate_proj.weight"] = (FFN, HIDDEN)
        shapes[f"model.layers.{i}.mlp.up_proj.weight"] = (FFN, HIDDEN)
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (HIDDEN, FFN)
    target.mkdir(parents=True)
    noise = torch.distributions.StudentT(4.0).sample((VOCAB * HIDDEN,)).mul_(0.02).bfloat16()
    specs = {name: Spec(torch.bfloat16, shape) for name, shape in shapes.items()}
    with ShardWriter(target, plan_shards(specs, 500_000_000)) as writer:
        for i, (name, (rows, columns)) in enumerate(shapes.items()):
            writer.append(name, noise.roll(i)[: rows * columns].reshape(rows, columns))
    write_json(target / "config.json", _config(layers))
    write_json(target / "tokenizer.json", {})
    return target


def _config(layers: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


def copy(source: Path, target: Path) -> None:
    """Read and write every file in chunks, durably."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        with open(file, "rb") as read, open(target / file.name, "wb") as write:
            while chunk := read.read(CHUNK):
                write.write(chunk)
            write.flush()
            os.fsync(write.fileno())


def timed(work: Callable[[Path], None], folder: Path) -> float:
    """Seconds of `work` into a new folder, which is removed."""
    target = folder / "out"
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    start = time.monotonic()
    work(target)
    seconds = time.monotonic() - start
    shutil.rmtree(target, ignore_errors=True)
    return seconds


def stream(name: str, source: Path, *, compile_: bool) -> Callable[[Path], None]:
    """One format, as the quantize stage runs it."""

    def work(target: Path) -> None:
        target.mkdir()
        options = Quantize.model_validate({"format": name, **FORMATS[name]})
        plan = plan_quantize(
            Checkpoint.open(source),
            options.build(),
            targets=options.targets,
            ignore=options.ignore,
            max_shard_size=500_000_000,
        )
        run_streaming(plan, target, torch.device("cpu"), lambda _: None, compile_=compile_)

    return work


def peer(python: Path, source: Path, scheme: str) -> float:
    """Seconds of model_free_ptq itself, imports left out; NaN where it fails."""
    target = source.parent / "peer"
    shutil.rmtree(target, ignore_errors=True)
    command = [str(python), "-c", PEER_CODE, str(source), str(target), scheme]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(target, ignore_errors=True)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("seconds ")]
    return float(found[-1]) if found else float("nan")


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS])
    parser.add_argument("--eager", action="store_true", help="measure the eager kernels too")
    parser.add_argument("--peer-python", type=Path, help="python of an environment with llm-compressor")
    args = parser.parse_args()
    source = args.folder / "source"
    if not source.is_dir():
        make_source(args.folder, args.gigabytes)
    small = args.folder / "small" / "source"
    if not small.is_dir():
        make_source(args.folder / "small", 0.3)
    first = {name: timed(stream(name, small, compile_=True), args.folder) for name in args.formats}
    works = {"copy": lambda target: copy(source, target)}
    works |= {name: stream(name, source, compile_=True) for name in args.formats}
    if args.eager:
        works |= {f"{name} eager": stream(name, source, compile_=False) for name in args.formats}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(args.rounds):
        for name, work in works.items():
            seconds[name].append(timed(work, args.folder))
    peers = {
        name: peer(args.peer_python, source, PEER[name]) for name in args.formats if args.peer_python and name in PEER
    }
    show(seconds, first, peers, sum(file.stat().st_size for file in source.iterdir()))


def show(seconds: dict[str, list[float]], first: dict[str, float], peers: dict[str, float], size: int) -> None:
    """The table: ratios to the copy of the same round, median; the peer's time over ours."""
    print(f"{size / 1e9:.2f} GB of bf16, {torch.get_num_threads()} threads, medians of {len(seconds['copy'])} rounds")
    print("| what | seconds | over the copy | first pass, 0.3 GB, compiling | peer over ours |")
    print("|---|---|---|---|---|")
    for name, times in seconds.items():
        ratio = statistics.median(t / c for t, c in zip(times, seconds["copy"], strict=True))
        compiling = f"{first[name]:.1f} s" if name in first else "–"
        against = f"{peers[name] / statistics.median(times):.1f}" if name in peers else "–"
        print(f"| {name} | {statistics.median(times):.2f} | {ratio:.2f} | {compiling} | {against} |")


if __name__ == "__main__":
    main()
