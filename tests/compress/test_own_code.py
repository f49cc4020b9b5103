"""A model whose code and tokenizer come with the checkpoint: run where the recipe trusts it, and only there."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, dynamic_module_utils

from compress.calibration import calibration_tokens
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
from compress.walk import walk
from quant.loader import load_model

CPU = torch.device("cpu")
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    def __call__(self, text, **options):
        return super().__call__(text.upper(), **options)
"""


@pytest.fixture
def own(tiny, tmp_path, monkeypatch):
    """A tiny Llama under a name that transformers does not know, and a tokenizer that shouts."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tiny / "own_code.py").write_text(CODE)
    for file, entries in {
        "config.json": {
            "model_type": "own",
            "architectures": ["OwnModel"],
            "auto_map": {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
        },
    }.items():
        (tiny / file).write_text(json.dumps(json.loads((tiny / file).read_text()) | entries))
    return tiny


def tokens():
    return torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(0))


def test_the_walk_needs_trust(own):
    with pytest.raises(CheckpointError, match=r"^transformers does not know model_type 'own'.*: set trust_remote"):
        next(walk(Checkpoint.open(own), tokens(), device=CPU))
    block = next(walk(Checkpoint.open(own), tokens(), device=CPU, trust_remote_code=True))
    assert type(block.module).__name__ == "LlamaDecoderLayer" and bool(block.inputs.isfinite().all())


@pytest.mark.parametrize("trusted", [True, False])
def test_code_beside_a_known_architecture_runs_only_where_trusted(trusted, own):
    config = json.loads((own / "config.json").read_text()) | {"model_type": "llama"}
    (own / "config.json").write_text(json.dumps(config))
    (own / "tokenizer_config.json").write_text("{}")
    assert type(load_model(own, trust_remote_code=trusted).model).__name__ == (
        "OwnModel" if trusted else "LlamaForCausalLM"
    )


def test_the_calibration_texts_pass_through_the_tokenizer_of_the_checkpoint(own):
    found = calibration_tokens(
        own, documents="python-docs", problems=None, size=(1, 64), evaluated=[], trust_remote_code=True
    )
    plain = AutoTokenizer.from_pretrained(own, trust_remote_code=True)
    text = plain.decode(found[0])
    assert text == text.upper() and text != text.lower()


@pytest.mark.parametrize(
    "stage",
    [
        {"quantize": {"format": "int8", "method": "awq"}},
        {"prune": {"target": {"num_hidden_layers": 1}, "axes": ["layers"]}},
    ],
    ids=["quantize", "prune"],
)
def test_calibrated_stages_run_code_that_the_recipe_trusts(stage, own, tmp_path, monkeypatch):
    monkeypatch.setattr(Place, "calibration_tokens", lambda place, wanted, source: tokens())
    place = Place(tmp_path / "work", 1 << 40, trust_remote_code=True)
    [plan] = plan_stages([Stage.model_validate(stage)], Checkpoint.open(own), place)
    run_stage(plan, CPU, lambda done: None)
    assert load_file(plan.result.path / "model.safetensors").keys() == plan.result.tensors.keys()
    assert (plan.result.path / "own_code.py").exists()
