"""Every architecture of the tables, every format and every method once, through the real stage and back.

The full product would take minutes: each row is a combination that is legal, and a test counts that none is left out.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import walk_block
from compress.checkpoint import Checkpoint
from compress.modules import modules
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
from quant import calibrated
from quant.formats import FORMATS
from quant.loader import load_model
from quant.methods import METHODS
from quant.stored import sort_tensors

ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "gpt-oss"),
)
G32 = {"group_size": 32}
CASES = [
    ("llama", "search", "int8", {}),
    ("llama", "awq-gptaq", "fp8-block", {}),
    ("mistral", "awq", "fp8", {"inputs": "static"}),
    ("mistral", "awq-gptq", "int4", {**G32, "symmetric": False}),
    ("qwen2", "awq", "fp8", {"strategy": "tensor"}),
    ("qwen2", "rtn", "nf4", {}),
    ("qwen3", "awq-gptaq", "mxfp4", {"activations": True}),
    ("qwen3", "rtn", "bnb-int8", {}),
    ("gemma2", "gptq", "mxfp8", {}),
    ("gemma3", "awq-gptq", "nvfp4", {"activations": True}),
    ("phi3", "awq-gptq", "fp8", {}),
    ("phi3", "rtn", "mxfp8", {"activations": False}),
    ("mixtral", "gptq", "fp8", {"strategy": "tensor", "inputs": "static"}),
    ("mixtral", "awq-gptaq", "mxfp4", {}),
    ("qwen2-moe", "awq-gptq", "nvfp4", {"activations": True}),
    ("qwen3-moe", "awq", "int4", G32),
    ("deepseek-v3", "awq-gptq", "nvfp4", {}),
    ("deepseek-v3", "search", "fp8", {"strategy": "tensor", "inputs": "static"}),
    ("gpt-oss", "awq-gptq", "int4", G32),
    ("qwen2", "rtn", "bf16", {}),
    ("qwen2", "learned", "int4", {**G32, "iterations": 8}),
    ("qwen3-moe", "learned", "nvfp4", {"activations": True, "iterations": 8}),
    ("gpt-oss", "learned", "mxfp4", {"iterations": 8}),
]
IDS = ["-".join((kind, method, name, *map(str, options.values()))) for kind, method, name, options in CASES]
CPU = torch.device("cpu")


def tokens():
    return torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def walked(monkeypatch):
    """What the walk leaves of every block: the weights by name, and the last block itself."""
    weights, last = {}, []
    original = calibrated.quantize_block

    def recording(block, assignments, method, **more):
        result = original(block, assignments, method, **more)
        weights.update({name: block.linears[name].weight.clone() for name in assignments})
        last[:] = [block]
        return result

    monkeypatch.setattr(calibrated, "quantize_block", recording)
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 64)
    monkeypatch.setattr(Place, "calibration_tokens", lambda place, wanted, source: tokens())
    return weights, last


def run(source, recipe, directory):
    stage = Stage.model_validate({"quantize": recipe})
    [plan] = plan_stages([stage], Checkpoint.open(source), Place(directory, 1 << 40))
    run_stage(plan, CPU, lambda done: None)
    return plan.result.path


@torch.no_grad()
def outputs(model):
    """The last block's hidden states and the logits."""
    kept = {}
    hook = model.model.layers[-1].register_forward_hook(
        lambda m, args, output: kept.update(hidden=output[0] if isinstance(output, tuple) else output)
    )
    logits = model(tokens()).logits
    hook.remove()
    return kept["hidden"], logits


def distance(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_stage_file_and_loader_agree(case, tiny_models, walked, tmp_path):
    kind, method, name, options = case
    source = tiny_models(kind)
    out = run(source, {"format": name, "method": method, **options}, tmp_path)
    checkpoint, (left, last) = Checkpoint.open(out), walked
    stored = sort_tensors(checkpoint).modules
    linears = [m.name for m in modules(Checkpoint.open(source)) if m.cls == "Linear" and m.name != "lm_head"]
    assert sorted(stored) == ([] if name == "bf16" else sorted(linears))
    assert left.keys() == (stored.keys() if METHODS[method].calibrated else set())
    for module, weight in left.items():
        assert torch.equal(stored[module].weight(checkpoint), weight)
    hidden, logits = outputs(load_model(out).model)
    assert bool(logits.isfinite().all())
    if last:  # sums of another order move a few roundings of inputs
        assert distance(last[0].inputs, hidden) < (5e-3 if stored[linears[0]].fmt.activations else 1e-4)
    reference = outputs(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval())[1]
    assert distance(logits, reference) < (0.5 if name in ("int4", "mxfp4", "nvfp4", "nf4") else 0.1)


def test_no_architecture_format_or_method_is_left_out():
    kinds, methods, names, options = zip(*CASES, strict=True)
    assert set(kinds) == set(ARCHITECTURES)
    assert set(methods) == METHODS.keys()
    assert set(names) == FORMATS.keys()
    for name, family in FORMATS.items():
        tried = [chosen for other, chosen in zip(names, options, strict=True) if other == name]
        for key in family.options.keys() & {"strategy", "inputs", "activations", "symmetric"}:
            values = {chosen.get(key, family.options[key].default) for chosen in tried}
            assert values == set(family.options[key].allowed), f"{name}: {key}"
