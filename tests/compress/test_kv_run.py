"""A quantized KV cache from recipe to verdict: both sides of the gate, on tiny models."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.checkpoint import Checkpoint
from compress.head import read_head
from compress.inspection import show
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
from evals.gate import Metric, decide
from evals.samples import load_samples
from evals.score import Reading, Reference, score
from evals.windows import encode
from quant.loader import load_model

SMALL = [
    "evals.documents.long={source: python-docs, words: 60, count: 20, max_tokens: 48}",
    "evals.problems.recall.words=20",
    "gate.metrics.long.max_increase=10%",
    "device=cpu",
]
KL = Metric(id="kl", kind="kl", data="long", margin=0.2)
FACTORS = {"q_proj": 8, "k_proj": 8, "v_proj": 20, "o_proj": 20, "embed_tokens": 20}


@pytest.fixture(scope="session")
def sharp(tiny_models, tmp_path_factory):
    """A model that attends sharply and is sure of what follows, so that damage to its keys shows."""
    directory = tmp_path_factory.mktemp("sharp")
    model = AutoModelForCausalLM.from_pretrained(tiny_models("llama"), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(FACTORS.get(name.split(".")[-2], 1))
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_models("llama")).save_pretrained(directory)
    return directory


def make(source, folder, *stages):
    """Run stages; the directory of the last one."""
    read = [Stage.model_validate(stage) for stage in stages]
    plans = plan_stages(read, Checkpoint.open(source), Place(folder, 10**9))
    for plan in plans:
        run_stage(plan, torch.device("cpu"), lambda _: None)
    return plans[-1].result.path


def judge(source, variant):
    """The verdict on the divergence as the worker and the gate come to it, and the variant as loaded."""
    samples = load_samples("long", kind="documents", source="python-docs", count=24, options={"words": 60})
    baseline, loaded = load_model(source), load_model(variant)
    encoded = encode(baseline.tokenizer, samples, max_length=512, max_tokens=96)
    kept = score(baseline.model, encoded, keep_states=True)
    reference = Reference(kept.states, read_head(baseline.model), tuple(sample.hash for sample in encoded))
    reading = Reading(4096, loaded.kv.make_cache if loaded.kv else None)
    rows = score(loaded.model, encoded, reading=reading, reference=reference).rows
    return decide(KL, kept.rows, rows, alpha=0.05).verdict, loaded


FP8 = {"kv_cache": {"scheme": "fp8", "calibration": {"samples": 8, "length": 128}}}


def test_a_planted_wrong_scale_is_blocked(sharp, tmp_path):
    variant = make(sharp, tmp_path, FP8)
    verdict, loaded = judge(sharp, variant)
    assert verdict == "PASS"
    assert max(side[name]["clipped"] for side in loaded.kv.record()["layers"] for name in ("keys", "values")) < 0.001

    tensors = load_file(variant / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] /= 1000
    save_file(tensors, variant / "model.safetensors", metadata={"format": "pt"})
    verdict, loaded = judge(sharp, variant)
    assert verdict == "FAIL"
    layers = loaded.kv.record()["layers"]
    assert layers[0]["keys"]["clipped"] > 0.5 > layers[1]["keys"]["clipped"]


def test_a_scale_that_is_too_large_is_blocked_as_well(sharp, tmp_path):
    variant = make(sharp, tmp_path, FP8)
    tensors = load_file(variant / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] *= 1e6  # every value rounds to zero
    save_file(tensors, variant / "model.safetensors", metadata={"format": "pt"})
    assert judge(sharp, variant)[0] == "FAIL"


def test_what_only_we_emulate_is_said_so(sharp, tmp_path, capsys):
    variant = make(sharp, tmp_path, {"kv_cache": {"scheme": "int4"}})
    show(str(variant), as_json=True)
    found = json.loads(capsys.readouterr().out)["kv_cache"]
    assert found == {
        "scheme": "int4 (group_size 32, residual 32)",
        "serving": "emulated only: no engine serves it from a checkpoint",
    }


def test_weights_and_kv_cache_in_one_run(sharp, tmp_path):
    words = [
        "recipe=fp8-kv-fp8.yaml",
        f"model={sharp}",
        *SMALL,
        "stages.1.kv_cache.calibration={samples: 4, length: 64}",
        "gate.metrics.recall.max_increase=2",
        "gate.metrics.kl.max=2",
    ]
    command = [sys.executable, "-m", "compress", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    out = tmp_path / "out/fp8-kv-fp8"
    run = json.loads((out / "evidence/run.json").read_text())
    assert [stage["name"] for stage in run["stages"]] == ["quantize", "kv_cache"]
    assert run["stages"][1]["report"] == {"calibration_texts": 4}
    rows = run["stages"][1]["layers"]
    assert [(row["pattern"], row["count"], row["shape"], row["bytes_before"], row["bytes_after"]) for row in rows] == [
        ("model.layers.*.self_attn", 2, [4, 32], 512, 256)
    ]
    assert run["kv_cache"]["scheme"] == "fp8 (granularity tensor)" and len(run["kv_cache"]["layers"]) == 2
    assert [entry["n"] for entry in run["recall"]] == [4] * 5
    report = (out / "evidence/report.md").read_text()
    assert "## KV cache" in report and "served by vLLM and SGLang" in report and "## Recall by depth" in report
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized" and config["kv_cache_scheme"]["strategy"] == "tensor"
    assert "Recall by depth" in (out / "evidence/report.html").read_text()
    assert not [name for name in os.listdir(tmp_path / "out") if name != "fp8-kv-fp8"]
