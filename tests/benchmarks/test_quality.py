"""The quality table: our rows are made by the real stage and measured, and what is kept is not made again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tiny, tmp_path):
    """Run the script on the tiny model; the lines of its table."""
    text = tmp_path / "text.txt"
    paragraphs = (f"Paragraph {i} says that {i} times {i} is {i * i} and no more. " * 8 for i in range(120))
    text.write_text("\n\n".join(paragraphs))
    script = [sys.executable, ROOT / "benchmarks" / "quality.py", tiny, tmp_path / "out", "--documents", text]

    def run(*rows):
        options = ["--counts", "2", "3", "--samples", "4", "--length", "32", "--rows", *rows]
        return subprocess.run([*script, *options], capture_output=True, text=True, check=True).stdout.splitlines()

    return run


def test_rows_are_measured_and_kept(run, tmp_path):
    lines = run("ours/int8/rtn", "ours/int8/awq")
    assert {line.split(" | ")[2] for line in lines[-2:]} == {"rtn", "awq"}
    kept = tmp_path / "out" / "rows" / "ours_int8_rtn.json"
    result = json.loads(kept.read_text())
    assert 8 < result["bits"] < 9.1  # one 16-bit scale a row of 32 columns
    assert 0 < result["documents_kl"] < 0.1 and result["peak_bytes"] > 1e7
    kept.write_text(json.dumps(result | {"documents_kl": 7.0}))
    assert "| 7.0000 |" in run("ours/int8/rtn")[-1]  # worst last, and not made again
