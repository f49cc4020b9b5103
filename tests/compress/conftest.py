"""A run's output as plain files: a checkpoint directory of a few bytes with evidence from made-up rows."""

from dataclasses import replace

import pytest

from compress.evidence import Evidence, write_evidence
from compress.evidence_files import Plan
from compress.manifest import build_manifest
from evals.gate import Metric, decide

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


@pytest.fixture
def make_run(tmp_path):
    """Write a run whose perplexity grows by about `shift`; keyword arguments replace fields of the evidence."""

    def make(shift=0.005, **fields):
        directory = tmp_path / "run"
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
        return directory, write_evidence(directory, replace(evidence, **fields))

    return make
