"""Methods on whole tiny models: every architecture, format and method goes through, reloads, and survives a kill."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import walk_block
from compress.checkpoint import Checkpoint
from compress.errors import Refused
from compress.walk import walk
from quant import folding, learned_block
from quant.calibrated import Calibration, _key
from quant.calibrated_block import quantize_block
from quant.folding import Fold, equalize
from quant.format import dequantize
from quant.formats import make_format
from quant.loader import load_model
from quant.methods import METHODS
from quant.plan import plan_quantize

KINDS = ("llama", "qwen2", "qwen3", "qwen3-moe")
FORMATS = {
    "int4": {"group_size": 32},
    "int8": {},
    "fp8": {},
    "mxfp4": {},
    "mxfp8": {},
    "nvfp4": {},
}
CPU = torch.device("cpu")
CALIBRATED = [name for name, method in METHODS.items() if method.calibrated]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 64)


def tokens(count=8, length=32):
    return torch.randint(3, 128, (count, length), generator=torch.Generator().manual_seed(0))


def energy(group):
    return group.statistics.hessian.diagonal()


def plan_for(directory, fmt, ignore=("lm_head",)):
    return plan_quantize(Checkpoint.open(directory), fmt, targets=("Linear",), ignore=ignore, max_shard_size=1 << 40)


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4"])
def test_what_the_walk_computed_is_what_the_files_say(name, method, tiny_models, calibrated, tmp_path):
    source, fmt = tiny_models("qwen2"), make_format(name, **FORMATS[name])
    assignments = {a.module.name: a for a in plan_for(source, fmt).quantized}
    for block in walk(Checkpoint.open(source), tokens(), device=CPU, reference=METHODS[method].reference):
        mine = {name: assignments[name] for name in block.linears}
        quantize_block(block, mine, METHODS[method], iterations=5)
    out, _ = calibrated(source, fmt, method, tmp_path / "out")
    model, states = load_model(out).model, {}
    model.model.layers[-1].register_forward_hook(lambda m, args, output: states.update(hidden=output))
    with torch.no_grad():
        model(tokens())
    torch.testing.assert_close(block.inputs, states["hidden"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_equalization_preserves_the_function(kind, tiny_models):
    directory, fmt = tiny_models(kind), make_format("int4", group_size=32)
    folded = 0
    for block in walk(Checkpoint.open(directory), tokens(), device=CPU):
        for name, parameter in block.tensors.items():  # uneven channels, so that there is something to do
            if name.endswith(("layernorm.weight",)):
                parameter.data *= torch.linspace(0.2, 5, parameter.numel())
        with torch.no_grad():
            before = block.forward(block.inputs)
            folded += len(equalize(block, dict.fromkeys(block.linears, fmt), torch.float32, energy))
            after = block.forward(block.inputs)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert folded >= 2


def test_a_fold_that_is_wrong_for_a_family_is_refused(tiny_models, monkeypatch):
    wrong = Fold("post_attention_layernorm", ("mlp.up_proj",))  # gate reads it too
    monkeypatch.setattr(folding, "FOLDS", (wrong,))
    block = next(walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU))
    block.tensors["model.layers.0.mlp.up_proj.weight"].data *= torch.logspace(-1, 1, 128)
    with pytest.raises(
        Refused, match=r"^equalization changed the output of model\.layers\.0 by .*: use another method"
    ):
        equalize(block, {"model.layers.0.mlp.up_proj": make_format("int4", group_size=32)}, torch.float32, energy)


class Killed(Exception):
    """Stands for a kill: nothing is cleaned up."""


@pytest.mark.parametrize(
    ("kind", "method"),
    [("qwen2", "awq-gptq"), ("qwen3-moe", "awq-gptq"), ("qwen3-moe", "awq-gptaq"), ("qwen2", "learned")],
)
def test_a_killed_run_goes_on_and_gives_the_same_bytes(kind, method, tiny_models, calibrated, tmp_path):
    source, fmt = tiny_models(kind), make_format("int4", group_size=32)
    whole, _ = calibrated(source, fmt, method, tmp_path / "a" / "out")

    def kill(done):
        raise Killed

    with pytest.raises(Killed):
        calibrated(source, fmt, method, tmp_path / "b" / "out", advance=kill)
    saved = [path.name for path in (tmp_path / "b" / "journal").rglob("*")]
    assert "model.layers.0.safetensors" in saved and "model.layers.1.safetensors" not in saved
    shutil.rmtree(tmp_path / "b" / "out")
    resumed, _ = calibrated(source, fmt, method, tmp_path / "b" / "out")
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not (tmp_path / "b" / "journal").exists()


def test_other_options_do_not_go_on_from_a_journal(tiny_models, tmp_path):
    plan = plan_for(tiny_models("llama"), make_format("int4", group_size=32))
    keys = {
        _key(plan, Calibration(method, share, tmp_path))
        for method in ("gptq", "awq-gptq")
        for share in (tokens(), tokens(4), tokens() + 1)
    }
    assert len(keys) == 6


def test_fused_layers_share_the_divisor_of_nvfp4(tiny_models, calibrated, tmp_path):
    out, _ = calibrated(tiny_models("qwen3-moe"), make_format("nvfp4"), "awq-gptq", tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    expert = [f"mlp.experts.1.{name}_proj" for name in ("gate", "up")]
    for fused in (attention, expert):
        assert len({float(tensors[f"model.layers.1.{name}.weight_global_scale"]) for name in fused}) == 1


def test_the_head_is_quantized_by_choice_without_inputs(tiny_models, calibrated, tmp_path):
    out, reports = calibrated(tiny_models("qwen3"), make_format("int8"), "awq-gptq", tmp_path / "out", ignore=())
    assert reports[-1]["layers"]["lm_head"]["tokens"] == 0
    assert "lm_head.weight_scale" in load_file(out / "model.safetensors")


def test_what_was_applied_is_reported_per_layer(tiny_models, calibrated, tmp_path):
    _, reports = calibrated(tiny_models("qwen3-moe"), make_format("int4", group_size=32), "gptq", tmp_path / "out")
    assert [report["block"] for report in reports] == ["model.layers.0", "model.layers.1"]
    layer = reports[0]["layers"]["model.layers.0.self_attn.o_proj"]
    assert layer["tokens"] == tokens().numel() and layer["damping"] == 0.01 and layer["dead"] == 0
    assert layer["error"] < layer["nearest"]
    assert sum(reports[0]["expert_tokens"].values()) == 2 * tokens().numel()  # two experts a token
    json.dumps(reports)


def test_a_weight_that_is_not_finite_is_refused(tiny, calibrated, tmp_path):
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused, match=r"^model\.layers\.1\.mlp\.down_proj cannot be quantized: a scale is not finite"):
        calibrated(tiny, make_format("int4", group_size=32), "gptq", tmp_path / "out")


def test_aiming_at_the_unquantized_outputs_ends_closer_to_them(tiny_models):
    source, fmt = tiny_models("llama"), make_format("int4", group_size=32)
    assignments = {a.module.name: a for a in plan_for(source, fmt).quantized}
    errors = {}
    for method in ("awq-gptq", "awq-gptaq"):
        for block in walk(Checkpoint.open(source), tokens(64), device=CPU, reference=True):
            quantize_block(block, {name: assignments[name] for name in block.linears}, METHODS[method])
        errors[method] = float((block.inputs - block.twin.inputs).norm())
    assert errors["awq-gptaq"] < 0.98 * errors["awq-gptq"]


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4"])
def test_learning_ends_closer_to_the_unquantized_outputs(name, tiny_models):
    source, fmt = tiny_models("llama"), make_format(name, **({"group_size": 32} if name == "int4" else {}))
    assignments = {a.module.name: a for a in plan_for(source, fmt).quantized}
    seen = tokens(64)
    errors = {}
    for method in ("awq-gptq", "awq-gptaq", "learned"):
        for block in walk(Checkpoint.open(source), seen, device=CPU, reference=True):
            mine = {name: assignments[name] for name in block.linears}
            stored, report = quantize_block(block, mine, METHODS[method], iterations=40)
            if method == "learned":
                assert report["learned"]["loss_after"] < report["learned"]["loss_before"]
            rounded = dequantize_all(stored, mine)
            assert all(torch.equal(block.linears[each].weight, rounded[each]) for each in mine)
            block.finish()
        errors[method] = float((block.inputs - block.twin.inputs).norm())
    assert errors["learned"] < min(errors["awq-gptaq"], 0.97 * errors["awq-gptq"])


def test_learning_never_makes_a_block_worse(tiny_models, monkeypatch):
    monkeypatch.setattr(learned_block, "RATE", 50.0)  # no iterate can be any good
    source, fmt = tiny_models("llama"), make_format("int4", group_size=32)
    assignments = {a.module.name: a for a in plan_for(source, fmt).quantized}
    found = {}
    for method in ("awq-gptaq", "learned"):
        block = next(walk(Checkpoint.open(source), tokens(), device=CPU, reference=True))
        mine = {name: assignments[name] for name in block.linears}
        found[method], report = quantize_block(block, mine, METHODS[method], iterations=5)
        block.finish()
        found[method] |= {"outputs": block.inputs}
    assert report["learned"]["loss_after"] == report["learned"]["loss_before"]
    assert all(torch.equal(tensor, found["learned"][name]) for name, tensor in found["awq-gptaq"].items())


def dequantize_all(stored, assignments):
    found = {}
    for name, assignment in assignments.items():
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in stored.items() if key.startswith(f"{name}.")}
        found[name] = dequantize(own, assignment.fmt, assignment.module.shape)
    return found
