"""The command line from end to end, on tiny models: real files, real worker processes, real verdicts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Models = Callable[[str], Path]
SMALL = [
    "evals.documents.text.count=20",
    "evals.documents.text.max_tokens=24",
    "evals.problems.math.count=20",
    "gate.aa_samples=2",
    "device=cpu",
]


def compress(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compress", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


def run(recipe: str, model: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return compress("run", f"recipe={recipe}", f"model={model}", *SMALL, *words, cwd=cwd)


@pytest.fixture(scope="session")
def passed(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a run that passes; its output is out/fp8."""
    cwd = tmp_path_factory.mktemp("passed")
    done = run("fp8.yaml", tiny_models("llama"), cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "PASS: every required metric shows a loss below its margin" in done.stdout
    return cwd


def test_output_is_a_checkpoint_and_nothing_else_is_left(passed: Path) -> None:
    assert sorted(path.name for path in (passed / "out").iterdir()) == ["fp8"]
    model = AutoModelForCausalLM.from_pretrained(passed / "out/fp8", dtype=torch.float32)
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()
    evidence = {path.name for path in (passed / "out/fp8/evidence").iterdir()}
    assert {"gate.json", "manifest.json", "recipe.lock.yaml", "environment.json", "run.json", "report.md"} <= evidence
    assert "junit.xml" in evidence


def test_evidence_says_what_was_done(passed: Path, tiny_models: Models) -> None:
    found = json.loads((passed / "out/fp8/evidence/run.json").read_text())
    assert found["bytes_after"] == sum(t.nbytes for t in load_file(passed / "out/fp8/model.safetensors").values())
    assert found["bytes_before"] > found["bytes_after"]
    layers = found["stages"][0]["layers"]
    assert {layer["reason"] for layer in layers} == {"", "in ignore", "Embedding is not in targets"}
    text = (passed / "out/fp8/evidence/environment.json").read_text()
    assert os.uname().nodename not in text


def test_verify_and_inspect(passed: Path) -> None:
    verified = compress("verify", "out/fp8", cwd=passed)
    assert verified.returncode == 0, verified.stdout
    assert "holds: PASS" in verified.stdout
    inspected = json.loads(compress("inspect", "out/fp8", "--json", cwd=passed).stdout)
    q_proj = next(group for group in inspected["groups"] if group["pattern"].endswith("q_proj"))
    assert q_proj["format"].startswith("fp8")
    assert q_proj["weights"] == 2 * 128 * 128
    assert 8 < q_proj["bits"] < 8.2


def test_flipped_byte_is_found(passed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(passed / "out/fp8", tmp_path / "fp8"))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    verified = compress("verify", str(copy), cwd=tmp_path)
    assert verified.returncode == 5
    assert "model.safetensors has other bytes than those in the manifest" in verified.stdout


def test_second_run_needs_overwrite(passed: Path, tiny_models: Models) -> None:
    done = run("fp8.yaml", tiny_models("llama"), cwd=passed)
    assert done.returncode == 2
    assert "exists: choose another output or add --overwrite" in done.stderr


def test_margin_that_cannot_be_met_blocks(tiny_models: Models, tmp_path: Path) -> None:
    nearest, margin = "stages.0.quantize.method=rtn", "gate.metrics.kl.max=1e-9"
    done = run("int4.yaml", tiny_models("llama"), nearest, "gate.metrics.kl.required=true", margin, cwd=tmp_path)
    assert done.returncode == 3, done.stderr + done.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["int4.blocked"]
    gate = json.loads((tmp_path / "out/int4.blocked/evidence/gate.json").read_text())
    assert (gate["verdict"], gate["exit_code"]) == ("FAIL", 3)
    assert compress("verify", "out/int4.blocked", cwd=tmp_path).returncode == 3


def test_nan_weight_is_refused_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})
    done = run("fp8.yaml", tiny, cwd=tmp_path)
    assert done.returncode == 5
    assert "model.layers.1.mlp.up_proj cannot be quantized" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def _heed_interrupts() -> None:
    """Take Ctrl-C as at a terminal: a shell starts a background job, and a suite in one, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _alive(session: int) -> list[str]:
    """The command lines of a session's processes, without those that only wait to be reaped by the system."""
    found = [each.info for each in psutil.process_iter(["status", "cmdline"]) if _session(each.pid) == session]
    return [" ".join(info["cmdline"] or []) for info in found if info["status"] != psutil.STATUS_ZOMBIE]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _start(model: Path, cwd: Path) -> subprocess.Popen[str]:
    """A run that is measuring the variant when this returns."""
    command = [sys.executable, "-m", "compress", "run", "recipe=fp8.yaml", f"model={model}", *SMALL]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )
    deadline = time.monotonic() + 120
    while not (cwd / "out/.fp8.staging/0-quantize").is_dir():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    return process


def test_interrupt_leaves_no_output_and_the_next_run_continues(tiny: Path, tmp_path: Path) -> None:
    process = _start(tiny, tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".fp8.staging"]
    done = run("fp8.yaml", tiny, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "done by an earlier run" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fp8"]


def test_a_pipeline_that_stops_a_run_is_taken_like_an_interrupt(tiny: Path, tmp_path: Path) -> None:
    process = _start(tiny, tmp_path)
    process.terminate()  # the command alone: its workers must go with it
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".fp8.staging"]
    assert _alive(process.pid) == []


def test_kill_leaves_no_output_and_the_next_run_is_whole(tiny: Path, tmp_path: Path) -> None:
    process = _start(tiny, tmp_path)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (tmp_path / "out/fp8").exists()
    assert not (tmp_path / "out/fp8.blocked").exists()
    assert run("fp8.yaml", tiny, cwd=tmp_path).returncode == 0
    assert compress("verify", "out/fp8", cwd=tmp_path).returncode == 0


def test_gate_on_two_checkpoints(tiny: Path, passed: Path, tmp_path: Path) -> None:
    variant = Path(shutil.copytree(passed / "out/fp8", tmp_path / "variant", ignore=shutil.ignore_patterns("evidence")))
    done = compress("gate", str(tiny), str(variant), "recipe=fp8.yaml", *SMALL, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gate"]["verdict"] == "PASS"
    assert compress("verify", str(variant), cwd=tmp_path).returncode == 0
    again = compress("gate", str(tiny), str(variant), "recipe=fp8.yaml", *SMALL, cwd=tmp_path)
    assert again.returncode == 2
    assert "add --overwrite" in again.stderr
    (variant / "evidence").rename(variant / ".evidence.old")  # as a kill in the midst of an overwrite leaves it
    found = compress("verify", str(variant), cwd=tmp_path)
    assert found.returncode == 2 and "a run was killed while it replaced it" in found.stderr
    again = compress("gate", str(tiny), str(variant), "recipe=fp8.yaml", *SMALL, "--overwrite", cwd=tmp_path)
    assert again.returncode == 0 and "evidence is back" in again.stderr
    assert compress("verify", str(variant), cwd=tmp_path).returncode == 0
    assert not list(variant.glob(".evidence*"))


def test_other_tokenizer_is_not_comparable(tiny: Path, passed: Path, tmp_path: Path) -> None:
    variant = Path(shutil.copytree(passed / "out/fp8", tmp_path / "variant", ignore=shutil.ignore_patterns("evidence")))
    (variant / "chat_template.jinja").write_text("{{ messages[0].content }}")
    done = compress("gate", str(tiny), str(variant), "recipe=fp8.yaml", *SMALL, cwd=tmp_path)
    assert done.returncode == 5
    assert "source and variant differ in chat template" in done.stdout


def test_gate_proves_itself(tiny: Path, tmp_path: Path) -> None:
    done = compress(
        "selftest",
        "recipe=fp8.yaml",
        f"model={tiny}",
        *SMALL,
        "gate.metrics.kl.required=true",
        "gate.metrics.kl.max=1e-3",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and [case["is"] for case in found["cases"]] == ["PASS", "FAIL", "REFUSED"]
