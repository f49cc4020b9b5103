"""Tiny mixtures beside the dense models, stages run on a directory."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from compress.checkpoint import Checkpoint
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage

TINY_MIXTRAL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def model_of(tiny_models: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A directory of the test's own with a tiny float32 model."""

    def get(kind: str) -> Path:
        target = tmp_path / kind
        shutil.copytree(tiny_models("llama" if kind == "mixtral" else kind), target)
        torch.manual_seed(0)
        model = (
            AutoModelForCausalLM.from_config(MixtralConfig(**TINY_MIXTRAL))
            if kind == "mixtral"
            else AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        )
        model.float().save_pretrained(target)
        return target

    return get


@pytest.fixture
def prune(tmp_path: Path) -> Callable[..., Path]:
    """prune(directory, **options) -> the directory that the stage wrote."""

    def run(source: Path, **options: Any) -> Path:
        calibration = {"documents": "python-docs", "problems": None, "samples": 32, "length": 128}
        stage = Stage.model_validate({"prune": {"calibration": calibration, **options}})
        (plan,) = plan_stages([stage], Checkpoint.open(source), Place(tmp_path / "out", 10**9))
        run_stage(plan, torch.device("cpu"), lambda _: None)
        return plan.result.path

    return run
