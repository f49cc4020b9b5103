"""The comparison with engines: our own column is real, a failing engine has a reason, results are kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tiny, tmp_path):
    """Run the script on the tiny model without any engine to install; its Markdown."""
    text = tmp_path / "text.txt"
    text.write_text("Words about nothing in particular, again and again. " * 60)
    script = [sys.executable, ROOT / "benchmarks" / "engines.py", tiny, "--cache", tmp_path / "cache", "--text", text]

    def run(*more):
        options = ["--documents", "1", "--tokens", "40", "--engines", *more]
        return subprocess.run([*script, *options], capture_output=True, text=True, check=True).stdout

    return run


def test_our_column_and_what_is_kept(run, tmp_path):
    lines = run().splitlines()
    assert lines[:2] == ["| checkpoint | ours |", "|---|---|"]
    assert lines[-1] == "Mean NLL per token over 39 tokens of 1 documents."
    (kept,) = (tmp_path / "cache" / "results").glob("*.json")
    result = json.loads(kept.read_text())
    assert len(result["nll"][0]) == 39 and result["formats"] == {}
    assert lines[2] == f"| tiny | {sum(result['nll'][0]) / 39:.4f} |"
    kept.write_text(json.dumps({"failed": "no CPU kernel"}))  # the second run takes what is there
    assert run().splitlines()[2] == "| tiny | not run: no CPU kernel |"
