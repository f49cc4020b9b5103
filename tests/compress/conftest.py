"""A run's output as plain files: a checkpoint directory of a few bytes with evidence from made-up rows."""

import copy
import shutil
from dataclasses import replace

import pytest

from compress.evidence import Evidence, write_evidence
from compress.evidence_files import Plan
from compress.manifest import build_manifest
from evals.gate import Metric, decide

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXT = Metric(id="text", kind="log_perplexity", data="docs", margin=0.03, samples=40)
MATH = Metric(id="math", kind="gold_nll", data="sums", margin=0.05)
KL = Metric(id="kl", kind="kl", data="docs", margin=0.2, required=False)
TASK = Metric(id="task", kind="accuracy", data="gsm8k/main", margin=0.08, looks=(60, 120))
RUN = {
    "command": "compress run recipe=int8.yaml",
    "source": "demo",
    "output": "out/int8",
    "stages": [
        {
            "name": "quantize",
            "summary": "quantize to int8 (rtn)",
            "seconds": 3.25,
            "layers": [
                {
                    "pattern": "model.layers.*.mlp.down_proj",
                    "count": 30,
                    "shape": [576, 1536],
                    "becomes": "int8",
                    "reason": "",
                    "bytes_before": 53_084_160,
                    "bytes_after": 26_600_000,
                },
                {
                    "pattern": "lm_head",
                    "count": 1,
                    "shape": [49152, 576],
                    "becomes": "16 bits",
                    "reason": "in ignore",
                    "bytes_before": 56_623_104,
                    "bytes_after": 56_623_104,
                },
            ],
        }
    ],
    "bytes_before": 269_000_000,
    "bytes_after": 134_500_000,
    "seconds": 61.2,
    "peak_bytes": 900_000_000,
}


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: needs a Chromium; deselected where there is none")


def pytest_collection_modifyitems(config, items):
    """Without a Chromium its tests are deselected, which the summary counts; they are never skipped in silence."""
    wanted = [item for item in items if CHROMIUM or not item.get_closest_marker("browser")]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted


@pytest.fixture
def chromium():
    """The browser's program."""
    return CHROMIUM


def likelihood_rows(n, shift=0.0, **fields):
    """n documents of 100 to 199 tokens at 2 nats per token; every other one loses twice the shift."""
    rows = []
    for i in range(n):
        tokens = 100 + 7 * i % 100
        nll = tokens * (2 + i % 5 / 10 + 2 * shift * (i % 2))
        rows.append({"id": f"d{i}", "hash": f"h{i}", "tokens": tokens, "bytes": 4 * tokens, "nll": nll, **fields})
    return rows


def answer_rows(n, wrong=()):
    return [{"id": i, "hash": f"h{i}", "score": float(i % 10 > 1 and i not in wrong)} for i in range(n)]


def rows_of(shift):
    return {
        "docs": (likelihood_rows(40), likelihood_rows(40, shift, kl=2.5, agree=60, top1=50)),
        "sums": (likelihood_rows(40), likelihood_rows(40, shift / 2)),
        "gsm8k/main": (answer_rows(120), answer_rows(120, wrong=(7, 8))),
    }


def _write_run(directory, shift, **fields):
    """A checkpoint of a few bytes with its evidence; returns what gate.json holds."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    metrics, rows = (TEXT, MATH, KL, TASK), rows_of(shift)
    results = [decide(metric, *rows[metric.data], alpha=0.05, aa_difference=0.0005) for metric in metrics]
    manifest = build_manifest(directory)
    evidence = Evidence(
        plan=Plan(0.05, metrics, {"docs": {"sha256": "ab" * 32, "count": 40}}),
        results=results,
        rows=rows,
        baseline=manifest,
        variant=manifest,
        recipe={"model": "demo", "gate": {"alpha": 0.05}},
        run=RUN,
        environment={"python": "3.11"},
    )
    return write_evidence(directory, replace(evidence, **fields))


@pytest.fixture(scope="session")
def write_run():
    """`_write_run`, for fixtures of a wider scope than a test."""
    return _write_run


@pytest.fixture(scope="session")
def written_runs(tmp_path_factory):
    """Runs by shift, written once: the pictures of the report take longer than everything else."""
    folder, gates = tmp_path_factory.mktemp("runs"), {}

    def get(shift):
        if shift not in gates:
            gates[shift] = _write_run(folder / str(shift), shift)
        return folder / str(shift), gates[shift]

    return get


@pytest.fixture
def make_run(tmp_path, written_runs):
    """A run of the test's own whose perplexity grows by about `shift`; keyword arguments replace evidence's fields."""

    def make(shift=0.005, **fields):
        directory = tmp_path / "run"
        if fields:
            return directory, _write_run(directory, shift, **fields)
        written, gate = written_runs(shift)
        return shutil.copytree(written, directory), copy.deepcopy(gate)

    return make
