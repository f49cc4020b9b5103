"""A run in two processes: the first does it, the second helps with the training and with nothing else."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.device import resolve_device
from compress.errors import InputError, RecipeError
from compress.evaluation import load_sets
from compress.ranks import environment_alone
from compress.recipe import Stage
from compress.recipe_file import load_recipe
from compress.stage_distill import check_memory
from compress.stages import Place, plan_stages, run_stage
from tests.processes import start_ranks

TRAINING = {"steps": 4, "batch": 4, "micro_batch": 2, "length": 32, "learning_rate": 1e-4}
DISTILL = {"training": TRAINING, "held_out": 4, "evaluate_every": 2}
RECIPE = {
    "output": "out",
    "device": "cpu",
    "stages": [
        {"prune": {"target": {"intermediate_size": 128}, "method": "random", "round_to": 64}},
        {"distill": DISTILL | {"top_k": 16}},
        {"distill": DISTILL | {"quantized": True}},
        {"quantize": {"format": "int4", "group_size": 64, "method": "rtn"}},
    ],
    "evals": {"documents": {"text": {"source": "python-docs", "count": 20, "max_tokens": 24}}},
    "gate": {"aa_samples": 2, "metrics": {"text": {"kind": "log_perplexity", "max_increase": "90%"}}},
}
CALIBRATED = {"format": "int4", "group_size": 64, "method": "gptq", "calibration": {"samples": 16, "length": 512}}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]


@pytest.fixture
def recipe(tiny_models, tmp_path):
    """A file whose run prunes, distils, and distils again under rounding."""
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(RECIPE | {"model": str(tiny_models("llama")), "output": str(tmp_path / "out")}))
    return file


def launch(recipe, *words, until=None):
    """Run a recipe in two processes, to its end or until a line begins so; exit code and standard error."""
    command = [*TORCHRUN, "compress", "run", f"recipe={recipe}", *words]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True) as process:
        if until:
            before = []
            while not (before and before[-1].startswith(until)):
                before.append(process.stderr.readline())
                assert before[-1], "".join(before)
            process.terminate()
        err = process.communicate()[1]
    return process.returncode, err


def in_one_process(recipe, folder):
    """The same stages here; their reports, and what the last one wrote."""
    found = load_recipe(str(recipe), [])
    place = Place(folder, found.max_shard_size, load_sets(found))
    plans = plan_stages(found.stages, Checkpoint.open(found.model), place)
    reports = [run_stage(plan, torch.device("cpu"), lambda _: None) for plan in plans]
    return reports, Checkpoint.open(plans[-1].result.path)


def test_two_processes_train_as_one_does_even_if_they_are_stopped_once(recipe, tmp_path):
    reports, expected = in_one_process(recipe, tmp_path / "here")
    for line in ("· step 2 of 4", "· hashing the variant"):
        code, err = launch(recipe, until=line)
        assert code != 0 and err.count("error: ") == err.count("error: interrupted") == 1, err

    staging = tmp_path / ".out.staging"
    for i in (1, 2):
        found = json.loads((staging / f"{i}-distill.report.json").read_text())["curve"]
        assert found == [pytest.approx(entry, rel=1e-4) for entry in reports[i]["curve"]] and len(found) == 3
    assert found[2]["kl"] < found[0]["kl"]
    written = Checkpoint.open(staging / "3-quantize")
    assert set(written.tensors) == set(expected.tensors)
    for name in written.tensors:
        ours, theirs = (side.read(name).contiguous().view(torch.uint8) for side in (written, expected))
        assert (ours == theirs).float().mean() > 0.99, name


def test_two_processes_calibrate_as_one_does(recipe, tmp_path):
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"stages": [{"quantize": CALIBRATED}]}))
    (report,), expected = in_one_process(recipe, tmp_path / "here")
    code, err = launch(recipe, until="· hashing the variant")
    assert code != 0 and err.count("error: ") == err.count("error: interrupted") == 1, err

    staging = tmp_path / ".out.staging"
    found = json.loads((staging / "0-quantize.report.json").read_text())
    assert found["calibration_tokens"] == 8192 and found["blocks"] == json.loads(json.dumps(report["blocks"]))
    (ours, theirs) = (folder / "model.safetensors" for folder in (staging / "0-quantize", expected.path))
    assert ours.read_bytes() == theirs.read_bytes()


def test_an_evaluation_is_nobodys_rank(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "HOME": "here"})
    assert environment_alone() == {"HOME": "here"}


def test_what_no_process_can_do_is_said_once(recipe, tmp_path):
    code, err = launch(recipe, "stages.1.distill.training.batch=3")
    assert code == 1 and len(re.findall(r"exitcode +: 2", err)) == 1
    assert err.count("error: training.batch is 3, which 2 processes cannot share evenly: say a multiple\n") == 1
    assert err.count("error: ") == 1 and not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("fine", (3, "2 of us\n2 of us\n"), (0, "2 of us\n2 of us\n")),
        ("loading", (2, "the second has no model\n"), (0, "")),
        ("working", (1, "process 1 of this run failed: ValueError('no')\n"), (1, "")),
        ("killed", (1, "a process of this run is gone: run the same command, it goes on from there\n"), (-9, "")),
    ],
)
def test_the_first_process_ends_with_what_fails_in_another(tmp_path, case, first, second):
    running = start_ranks(2, "tests.compress.ranks", case, str(tmp_path))
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [(process.returncode, out) for process, out in zip(running, said, strict=True)] == [first, second]


@pytest.fixture
def three_processes(monkeypatch):
    """As the first of three that a launcher has started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "3" if "WORLD" in name else "0")


def test_what_several_processes_cannot_do_is_refused_first(three_processes, tiny_models, monkeypatch):
    with pytest.raises(InputError, match="device 'cpu:0' is one GPU, but a launcher gives each process its own: say"):
        resolve_device("cpu:0")

    source, place = Checkpoint.open(tiny_models("llama")), Place(Path("out"), 10**9)
    few = {**CALIBRATED, "calibration": {"samples": 8, "length": 512}}
    stage = Stage.model_validate({"quantize": few})
    with pytest.raises(RecipeError, match="8 samples of 512 tokens make 2 batches of 2048, fewer than the 3 processes"):
        plan_stages([stage], source, place)

    weights = sum(math.prod(info.shape) for info in source.tensors.values())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=weights * 59))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="are here for each of 3 processes: set distill"):
        check_memory(source, source)
