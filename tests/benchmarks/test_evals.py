"""The comparison with lm-eval runs from end to end on a tiny model, and both sides agree."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDE = {**os.environ, "COLUMNS": "200"}  # or the table is wrapped


def test_sums_agree(tiny):
    script = [sys.executable, ROOT / "benchmarks" / "evals.py", "--model", tiny]
    options = ["--documents", "1", "--problems", "2", "--rounds", "1", "--auto"]
    shown = subprocess.run([*script, *options], capture_output=True, text=True, check=True, env=WIDE).stdout
    rows = [row for row in shown.splitlines() if re.search("ours|lm-eval", row)]
    differences = [float(re.findall(r"\d\.\de[+-]\d\d", row)[-1]) for row in rows]
    assert len(differences) == 10
    same_dtype = [value for row, value in zip(rows, differences, strict=True) if "dtype auto" not in row]
    assert max(same_dtype) < 1e-3
