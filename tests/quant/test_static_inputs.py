"""Calibrated input scales: what is stored is compressed-tensors', and what the walk and the loader compute agrees."""

import json
import shutil

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress import walk_block
from compress.checkpoint import Checkpoint
from compress.errors import InputError, RecipeError, Refused
from compress.inspection import inspect
from compress.tensor_file import Spec
from compress.walk import walk
from quant.activations import activation_quantizer, input_scale
from quant.dequantizing import plan_dequantize
from quant.formats import make_format
from quant.loader import load_model
from quant.options import Quantize
from quant.plan import plan_quantize
from quant.scheme import formats_of
from quant.static_inputs import input_ranges

CPU = torch.device("cpu")
FORMATS = {
    "fp8": make_format("fp8", strategy="tensor", inputs="static"),
    "fp8-channel": make_format("fp8", inputs="static"),
    "nvfp4": make_format("nvfp4", activations=True),
}
PRESETS = {"fp8": "FP8", "nvfp4": "NVFP4"}
TENSORS = {"fp8": ("input_scale", torch.bfloat16), "nvfp4": ("input_global_scale", torch.float32)}


def tokens():
    return torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def plan_for(directory, fmt, ignore=("lm_head",)):
    return plan_quantize(Checkpoint.open(directory), fmt, targets=("Linear",), ignore=ignore, max_shard_size=1 << 40)


def inputs():
    """(64, 128) with heavy tails, a zero token, and tokens far below the largest."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).sinh() * 3
    x[3], x[4] = 0, x[4] * 1e-4
    return x


@pytest.mark.parametrize("name", PRESETS)
def test_the_configuration_is_the_preset_of_compressed_tensors(name):
    preset = preset_name_to_scheme(PRESETS[name], ["Linear"])
    ours = QuantizationArgs(**FORMATS[name].activations)
    assert ours.model_dump(exclude={"observer"}) == preset.input_activations.model_dump(exclude={"observer"})
    assert QuantizationArgs(**FORMATS[name].weights).strategy == preset.weights.strategy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("largest", [1e-30, 0.3, 448.0, 6e4])
def test_scales_are_those_of_compressed_tensors(largest, dtype):
    absmax = torch.tensor(largest)
    args = FORMATS["fp8"].activations
    theirs, _ = calculate_qparams(-absmax.to(dtype), absmax.to(dtype), QuantizationArgs(**args))
    ours = input_scale(args, absmax.to(dtype).float(), dtype)
    assert ours.dtype == dtype and torch.equal(ours, theirs.reshape(1))
    ours = input_scale(FORMATS["nvfp4"].activations, absmax, dtype)
    assert ours.dtype == torch.float32 and torch.equal(ours, generate_gparam(-absmax, absmax).reshape(1))


@pytest.mark.parametrize("name", PRESETS)
def test_emulation_is_the_fake_quantization_of_compressed_tensors(name):
    x, args = inputs(), QuantizationArgs(**FORMATS[name].activations)
    scale = input_scale(FORMATS[name].activations, x.abs().amax(), torch.bfloat16)
    ours = activation_quantizer(FORMATS[name].activations, scale=scale)(x)
    if name == "fp8":
        theirs = fake_quantize(x, scale.float(), torch.zeros(1), args)
    else:
        blocks = x.reshape(64, 8, 16)
        local, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=scale)
        theirs = fake_quantize(x, local, zero, args, global_scale=scale)
    assert torch.equal(ours, theirs)
    assert float((ours - x).norm() / x.norm()) < (0.04 if name == "fp8" else 0.15)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_planned_is_written_and_read(name, kind, tiny_models, calibrated, tmp_path):
    plan = plan_for(tiny_models(kind), FORMATS[name])
    out, _ = calibrated(tiny_models(kind), FORMATS[name], "search", tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    assert {n: Spec(t.dtype, tuple(t.shape)) for n, t in tensors.items()} == plan.outputs
    suffix, dtype = TENSORS[name]
    for module in plan.quantized:
        scale = tensors[f"{module.module.name}.{suffix}"]
        assert scale.dtype == dtype and scale.shape == (1,) and scale.isfinite() and scale > 0
    checkpoint = Checkpoint.open(out)
    read = formats_of(checkpoint.config)("model.layers.0.self_attn.q_proj", "Linear")
    assert read.activations["dynamic"] == FORMATS[name].activations["dynamic"]
    assert sum(group.nbytes for group in inspect(checkpoint)) == checkpoint.nbytes
    labels = {group.format for group in inspect(checkpoint) if group.format.startswith(name)}
    assert labels == {f"{name} ({', '.join(f'{key}={value}' for key, value in FORMATS[name].options.items())})"}
    plain = plan_dequantize(checkpoint, max_shard_size=1 << 40).shards.files
    assert not any(suffix in tensor for specs in plain.values() for tensor in specs)


@pytest.mark.parametrize("name", PRESETS)
def test_layers_that_engines_fuse_share_their_scales(name, tiny_models, calibrated, tmp_path):
    """vLLM takes the largest scale of fused layers and of all experts of a layer, and is less exact if they differ."""
    out, _ = calibrated(tiny_models("qwen3-moe"), FORMATS[name], "search", tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    suffix, _ = TENSORS[name]
    attention = [f"self_attn.{part}_proj" for part in "qkv"]
    experts = {part: [f"mlp.experts.{expert}.{part}_proj" for expert in range(4)] for part in ("gate", "up", "down")}
    for shared in (attention, experts["gate"] + experts["up"], experts["down"]):
        assert len({float(tensors[f"model.layers.0.{layer}.{suffix}"]) for layer in shared}) == 1
    weight_scale = "weight_scale" if name == "fp8" else "weight_global_scale"
    for fused in (attention, [f"mlp.experts.1.{part}_proj" for part in ("gate", "up")]):
        assert len({float(tensors[f"model.layers.0.{layer}.{weight_scale}"]) for layer in fused}) == 1


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_ranges_are_the_largest_inputs_of_all_tokens(kind, tiny_models, monkeypatch):
    """Slow twin: every input of every linear, kept."""
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 64)
    block = next(walk(Checkpoint.open(tiny_models(kind)), tokens(), device=CPU))
    found = input_ranges(block, [*block.linears])
    seen = {name: [] for name in block.linears}
    for name, linear in block.linears.items():
        linear.register_forward_pre_hook(lambda _, args, kept=seen[name]: kept.append(args[0].abs().max().item()))
    with torch.no_grad():
        for at in range(0, 8, 2):
            block.forward(block.inputs[at : at + 2])
    for name, values in seen.items():
        others = [v for other, vs in seen.items() if other.split(".")[6:] == name.split(".")[6:] for v in vs]
        assert float(found[name]) == max(others if "experts" in name else values)


@pytest.mark.parametrize("name", ["fp8", "fp8-channel"])
def test_transformers_loads_them_and_computes_the_same(name, tiny_float32, calibrated, tmp_path):
    out, _ = calibrated(tiny_float32("llama"), FORMATS[name], "search", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert torch.equal(logits(load_model(out).model), logits(theirs))


class Killed(Exception):
    """Stands for a kill: nothing is cleaned up."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_killed_run_goes_on_and_gives_the_same_bytes(name, tiny_models, calibrated, tmp_path):
    source = tiny_models("llama")
    whole, _ = calibrated(source, FORMATS[name], "search", tmp_path / "a" / "out")

    def kill(done):
        raise Killed

    with pytest.raises(Killed):
        calibrated(source, FORMATS[name], "search", tmp_path / "b" / "out", advance=kill)
    shutil.rmtree(tmp_path / "b" / "out")
    resumed, _ = calibrated(source, FORMATS[name], "search", tmp_path / "b" / "out")
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def changed(directory, name, value):
    tensors = load_file(directory / "model.safetensors")
    tensors[name][:] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("name", PRESETS)
def test_inputs_that_are_all_zero_or_not_finite_are_refused(name, tiny, calibrated, tmp_path):
    changed(tiny, "model.layers.1.mlp.up_proj.weight", 0)
    message = (
        r"^model\.layers\.1\.mlp\.down_proj cannot have a static input scale: the largest of its calibration inputs is "
        r"0\.0, not a positive number; add it to ignore$"
    )
    with pytest.raises(Refused, match=message):
        calibrated(tiny, FORMATS[name], "search", tmp_path / "zero")
    changed(tiny, "model.layers.1.mlp.up_proj.weight", float("nan"))
    with pytest.raises(
        InputError, match=r"^a calibration activation at model\.layers\.1\.mlp\.down_proj is NaN or inf"
    ):
        calibrated(tiny, FORMATS[name], "search", tmp_path / "nan")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"format": "fp8", "inputs": "static", "method": "rtn"}, "the inputs of fp8 need a calibrated scale"),
        ({"format": "nvfp4", "activations": True, "method": "rtn"}, "the inputs of nvfp4 need a calibrated scale"),
        (
            {"format": "fp8", "overrides": [{"targets": ["re:.*o_proj$"], "format": "nvfp4", "activations": True}]},
            "the inputs of nvfp4 need a calibrated scale, which 'rtn' has not: use search or gptq or awq or awq-gptq",
        ),
    ],
    ids=["fp8", "nvfp4", "override"],
)
def test_a_method_without_calibration_is_refused(recipe, message):
    with pytest.raises(ValidationError, match=message):
        Quantize.model_validate(recipe)


def test_static_inputs_take_a_calibrated_method_by_default():
    assert Quantize.model_validate({"format": "fp8", "inputs": "static"}).method == "search"
    assert Quantize.model_validate({"format": "nvfp4", "activations": True}).method == "awq-gptq"
    assert Quantize.model_validate({"format": "fp8"}).method == "rtn"


def test_layers_that_calibration_does_not_reach_are_refused(tiny_models):
    message = (
        "lm_head lies outside the decoder blocks, so calibration sees no input of it: add it to ignore, or give it a "
        "format without static inputs"
    )
    with pytest.raises(RecipeError, match=f"^{message}$"):
        plan_for(tiny_models("qwen3"), FORMATS["fp8"], ignore=())


def test_experts_with_a_scale_per_channel_are_refused(tiny_models):
    message = (
        "model.layers.0.mlp.experts.0.down_proj has static inputs and one scale per channel, which vLLM refuses for "
        "experts: set strategy to tensor, or inputs to dynamic"
    )
    with pytest.raises(RecipeError, match=f"^{message}$"):
        plan_for(tiny_models("qwen3-moe"), FORMATS["fp8-channel"])


def test_a_scale_that_was_lost_is_refused(tiny_models, calibrated, tmp_path):
    out, _ = calibrated(tiny_models("llama"), FORMATS["fp8"], "search", tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.input_scale"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"^model\.layers\.0\.mlp\.down_proj: the activations need input_scale"):
        load_model(out)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "float-quantized"
