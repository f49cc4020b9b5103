"""The words of the command line: units, defaults, and an answer to every misspelling."""

import pytest

from compress.errors import InputError
from compress.planner.engine import find_engine
from compress.planner.gpus import GPUS, find_gpu
from compress.planner.options import Ask, parse_options
from compress.planner.plan import run_plan

NEEDED = {"gpu": "H100-80GB", "users": "160", "context": "4096"}


def test_every_option_is_read() -> None:
    given = {
        **NEEDED,
        "context": "4k",
        "tp": "2",
        "formats": "bf16, FP8,fp8",
        "kv": "int4",
        "ttft": "150ms",
        "tpot": "0.05s",
        "output": "256",
        "util": "0.9",
        "seqs": "256",
        "batched": "2k",
        "engine": "vllm-0.10",
    }
    assert parse_options(given) == Ask(
        gpu="H100-80GB",
        users=160,
        context=4096,
        tp=2,
        formats=("bf16", "fp8"),
        kv=("int4",),
        ttft=0.15,
        tpot=0.05,
        output=256,
        util=0.9,
        seqs=256,
        batched=2048,
        engine="vllm-0.10",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"usres": "3"}, "option 'usres' is not known: did you mean 'users'?"),
        ({"xyz": "3"}, "option 'xyz' is not known: use one of gpu, users, context, tp, formats, kv, ttft, tpot, "),
        ({"users": "many"}, "users='many' is not a whole number above 0: say for example users=4096 or users=4k"),
        ({"users": "0"}, "users='0' is not a whole number above 0"),
        ({"context": "-5"}, "context='-5' is not a whole number above 0"),
        ({"ttft": "150"}, "ttft='150' is not a time above 0: give it a unit, as in ttft=150ms or ttft=0.2s"),
        ({"tpot": "0ms"}, "tpot='0ms' is not a time above 0"),
        ({"tpot": "nan"}, "tpot='nan' is not a time above 0"),
        ({"util": "nan"}, "util='nan' is not a share between 0 and 1: say for example util=0.92"),
        ({"util": "92"}, "util='92' is not a share between 0 and 1"),
        ({"formats": " ,"}, "formats= is empty: name at least one, separated by commas"),
        ({"output": "4096"}, "output=4096 leaves no room for a prompt in context=4096: make it smaller"),
    ],
    ids=lambda value: next(iter(value.items()))[0] + next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_bad_options(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_options({**NEEDED, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("key", NEEDED)
def test_needed_options(key: str) -> None:
    with pytest.raises(InputError, match=f"^{key}= is missing: say for example gpu=H100-80GB users=160 context=4096$"):
        parse_options({name: value for name, value in NEEDED.items() if name != key})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "H100-90GB"}, "gpu 'H100-90GB' is not known: did you mean 'H100-80GB'?"),
        ({"engine": "vllm-0.12"}, "engine 'vllm-0.12' is not known: did you mean 'vllm-0.2'?"),
        ({"formats": "mxpf4"}, "format 'mxpf4' is not known: did you mean 'mxfp4'?"),
        ({"kv": "bf8"}, "KV format 'bf8' is not known: did you mean 'fp8'?"),
    ],
    ids=["gpu", "engine", "format", "kv"],
)
def test_misspelt_names_are_told_before_the_model_is_read(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        run_plan("no/such-model", {**NEEDED, **options})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["H100-80GB", "h100", "H100 80GB", "h100_sxm", "H100-80gb"])
def test_a_gpu_goes_by_many_names(name: str) -> None:
    assert find_gpu(name) is GPUS["H100-80GB"]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_gpu_rows_are_sane(gpu: object) -> None:
    row = GPUS[gpu.name]  # type: ignore[attr-defined]
    label = float(row.name.rpartition("-")[2].removesuffix("GB"))
    assert 0.85 * label <= row.memory <= label, "memory is in GiB, below the label"
    assert row.source
    assert row.fp8 is None or row.fp8 == pytest.approx(2 * row.bf16, rel=0.02)
    assert row.tflops("bf16") == row.bf16
    assert row.tflops("fp8") >= row.bf16


def test_engine_generations_have_sources() -> None:
    assert find_engine("vllm").util == 0.92
