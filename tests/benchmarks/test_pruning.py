"""The comparison of pruning methods runs from end to end on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_variant_has_a_row(tiny, tmp_path):
    options = "--ratios 16 --methods activation obs --round-to 64 --documents 2 --problems 2 --samples 2"
    script = [sys.executable, ROOT / "benchmarks" / "pruning.py", tiny, *options.split(), "--work", tmp_path / "work"]
    done = subprocess.run(script, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["source", "-16% activation", "-16% obs"]
    assert [row[1] for row in rows] == ["0.3 M", "0.3 M", "0.3 M"]
    assert rows[0][2:5] == ["0.0000", rows[0][3], "+0.0000"]
    assert all(float(row[2]) > 0 for row in rows[1:])
    assert (tmp_path / "work" / "ffn-16-obs" / "0-prune" / "config.json").exists()
