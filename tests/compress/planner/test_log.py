"""Calibration with the user's own start-up lines, in the wording of each generation."""

from collections.abc import Callable
from pathlib import Path

import pytest

from compress.errors import InputError
from compress.planner.engine import GIB, room_from_log
from compress.planner.enginelog import EngineLog, parse_log
from compress.planner.formats import KV_FORMATS
from compress.planner.kv import layout
from compress.planner.model import Model
from compress.planner.plan import run_plan
from compress.planner.weights import on_gpu

V0 = (
    "the current vLLM instance can use total_gpu_memory (79.22GiB) x gpu_memory_utilization (0.90) = 71.30GiB\n"
    "model weights take 14.96GiB; non_torch_memory takes 1.79GiB; PyTorch activation peak memory takes 1.26GiB; "
    "the rest of the memory reserved for KV Cache is 53.29GiB.\n"
    "# cuda blocks: 27284, # CPU blocks: 2048"
)
V1 = (
    "INFO [gpu_model_runner.py:5483] Model loading took 14.99 GiB memory and 3.2 seconds\n"
    "INFO [gpu_worker.py:564] Available KV cache memory: 51.38 GiB\n"
    "INFO [kv_cache_utils.py:1882] GPU KV cache size: 420,896 tokens\n"
    "INFO [kv_cache_utils.py:1883] Maximum concurrency for 16,000 tokens per request: 26.31x"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(V0, EngineLog(53.29, 14.96, 27284 * 16, None), id="v0"),
        pytest.param(V1, EngineLog(51.38, 14.99, 420896, (16000, 26.31)), id="v1"),
        pytest.param("# GPU blocks: 7351, # CPU blocks: 512", EngineLog(None, None, 7351 * 16, None), id="2023"),
        pytest.param(
            "Actual usage is 7.39 GiB for weight, 1.54 GiB for peak activation. Available KV cache memory: 63.25 GiB",
            EngineLog(63.25, 7.39, None, None),
            id="2026-summary",
        ),
        pytest.param("Available KV cache memory: -2.14 GiB", EngineLog(-2.14, None, None, None), id="negative"),
    ],
)
def test_wordings(text: str, expected: EngineLog) -> None:
    assert parse_log(text) == expected


def test_a_log_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text(V1)
    assert parse_log(str(tmp_path / "vllm.log")) == parse_log(V1)


@pytest.mark.parametrize("text", ["", "hello", "GPU KV cache size: 0 tokens"])
def test_a_log_without_the_line_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^log= holds no line that says how much memory the KV cache got: paste"):
        parse_log(text)


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        pytest.param(V1, 51.38, id="gib"),
        pytest.param("Maximum concurrency for 16,000 tokens per request: 26.31x", 51.38, id="concurrency"),
        pytest.param("GPU KV cache size: 420,896 tokens", 51.38, id="tokens"),
    ],
)
def test_room_comes_from_any_of_the_lines(text: str, gib: float, model: Callable[[str], Model]) -> None:
    llama = model("Llama-3.1-8B")
    cache = layout(llama, KV_FORMATS["bf16"], 1, in_flight=8192)
    weights = on_gpu(llama, "bf16", 1).best
    found = room_from_log(parse_log(text), cache, weights, weights)
    assert found.low == found.best == found.high
    assert found.best / GIB == pytest.approx(gib, rel=0.002)


def test_a_lighter_format_gets_the_difference(config_path: Callable[[str], str]) -> None:
    """A log of the 16-bit model tells the room of every format."""
    options = {"gpu": "H100", "users": "100", "context": "4k", "formats": "bf16,fp8", "kv": "bf16", "log": V1}
    report = run_plan(config_path("Llama-3.1-8B"), options)
    bf16, fp8 = report.rows
    assert bf16.room.best / GIB == pytest.approx(51.38, abs=0.04)
    assert fp8.room.best - bf16.room.best == bf16.weights - fp8.weights
    assert bf16.users.low == bf16.users.high == 102
    assert any("calibrated with your log" in line for line in report.assumptions)


def test_gpt_oss_120b_on_one_h100_by_its_own_log(config_path: Callable[[str], str]) -> None:
    """Memory that the constants leave in doubt becomes exact: 3.33 GiB, a handful of users."""
    log = "Model loading took 64.38 GiB. Available KV cache memory: 3.33 GiB"
    options = {"gpu": "H100", "users": "8", "context": "4k", "formats": "stored", "kv": "bf16"}
    guess = run_plan(config_path("gpt-oss-120b"), options).rows[0]
    known = run_plan(config_path("gpt-oss-120b"), {**options, "log": log}).rows[0]
    assert guess.users.low == 0 < guess.users.best
    assert known.room.best / GIB == pytest.approx(3.33, abs=0.25)
    assert known.users.low == known.users.best > 0
