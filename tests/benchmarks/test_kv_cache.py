"""The table of KV-cache schemes runs as its first lines say, on a tiny model."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table(tiny_models: Callable[[str], Path], tmp_path: Path) -> None:
    words = [
        "--model",
        str(tiny_models("llama")),
        "--tokens",
        "48",
        "--documents",
        "2",
        "--schemes",
        "int8",
        "fp8-cast",
    ]
    command = [sys.executable, str(ROOT / "benchmarks/kv_cache.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[:3]]  # as they are measured, before the table
    assert [row[:2] for row in rows] == [["exact", "16"], ["int8", "9"], ["fp8-cast", "8"]]
    perplexities = [float(row[2]) for row in rows]
    assert len(set(perplexities)) == 3, "a scheme that changes nothing was not applied"
    assert rows[0][3:6] == ["+0.00%", "0", "1"]
