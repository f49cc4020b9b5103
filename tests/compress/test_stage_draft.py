"""The draft stage: a folder beside weights that stay as they are."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from compress.recipe import Stage
from compress.recipe_file import parse_recipe, recipe_text
from compress.stage_plan import Place
from compress.stage_report import stage_sections
from compress.stages import plan_stages, run_stage

TRAINING = {"steps": 2, "batch": 2, "micro_batch": 2, "length": 24, "learning_rate": 0.002}
OPTIONS = {
    "layers": 1,
    "ffn": 128,
    "prompts": 2,
    "prompt_tokens": 8,
    "new_tokens": 6,
    "distill": {"training": TRAINING, "held_out": 2, "evaluate_every": 2},
}


@pytest.mark.parametrize("first", [[], [{"quantize": {"format": "fp8"}}]], ids=["16 bits", "fp8"])
def test_a_draft_that_transformers_loads_beside_its_target(tiny_models, tmp_path, first):
    stages = [Stage.model_validate(stage) for stage in [*first, {"draft": OPTIONS}]]
    plans = plan_stages(stages, Checkpoint.open(tiny_models("llama")), Place(tmp_path, 10**9))
    reports = [run_stage(plan, torch.device("cpu"), lambda _: None) for plan in plans]
    before, after = plans[-1].source, Checkpoint.open(plans[-1].result.path)
    assert after.config == before.config and set(after.tensors) == set(before.tensors)
    same = (
        torch.equal(after.read(name).view(torch.uint8), before.read(name).view(torch.uint8)) for name in after.tensors
    )
    assert all(same)

    draft = AutoModelForCausalLM.from_pretrained(after.path / "draft")
    assert draft.config.num_hidden_layers == 1 and draft.config.intermediate_size == 128
    assert AutoTokenizer.from_pretrained(after.path / "draft").get_vocab()
    found = reports[-1]["draft"]
    assert GenerationConfig.from_pretrained(after.path / "draft").num_assistant_tokens == found["guesses"]
    assert (
        found["tokens"] == 12
        and 0 <= found["acceptance_rate"] <= 1
        and found["parameters"] < found["target_parameters"]
    )
    sections = stage_sections({"stages": [{"summary": "draft", "report": reports[-1]}]})
    assert [part.title for part in sections] == ["Training: draft", "Draft"]
    faster = found["expected_speedup"] > 1
    assert ("is worth serving" if faster else "slows its target down") in sections[1].text
    assert sorted(path.name for path in tmp_path.glob("*.journal")) == []


def test_a_draft_comes_last():
    words = "stages=[{draft: {layers: 2}}, {quantize: {format: fp8}}]"
    with pytest.raises(RecipeError, match="a draft learns from what is released, so it comes last"):
        parse_recipe(recipe_text("fp8"), [words], "fp8")


def test_more_layers_than_there_are_are_refused_before_the_work(tiny_models, tmp_path):
    stage = Stage.model_validate({"draft": {**OPTIONS, "layers": 3}})
    message = re.escape("draft.layers is 3, but the target has 2 layers: say fewer")
    with pytest.raises(RecipeError, match=message):
        plan_stages([stage], Checkpoint.open(tiny_models("llama")), Place(tmp_path, 10**9))
