"""Whatever would make the evaluated model another one than the engine's is an error, and says what and where."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import CheckpointError, Refused
from quant.formats import make_format
from quant.loader import load_model

PROJ = "model.layers.0.self_attn.q_proj"
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def edit(directory, *, tensors=None, drop=(), config=None, block=None):
    """Change tensors, config.json, or its quantization_config in place."""
    path = directory / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    save_file(stored | (tensors or {}), path, metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text()) | (config or {})
    if block:
        text["quantization_config"] |= block
    (directory / "config.json").write_text(json.dumps(text))
    return directory


def damaged(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


@pytest.fixture
def int8(quantized):
    return quantized("llama", make_format("int8"))


PLAIN = {
    "missing": ({"drop": ["model.norm.weight"]}, "missing: model.norm.weight"),
    "unexpected": ({"tensors": {"model.layers.9.x": torch.ones(2)}}, "unexpected: model.layers.9.x"),
    "shape": (
        {"tensors": {"model.norm.weight": torch.ones(7)}},
        "of another shape: model.norm.weight [7] for [128]",
    ),
    "nan": ({"tensors": {"model.norm.weight": torch.full((128,), float("nan"))}}, "NaN or infinite: model.norm.weight"),
    "several": (
        {"drop": ["model.norm.weight"], "tensors": {"odd": torch.ones(1)}},
        "missing: model.norm.weight; unexpected: odd",
    ),
}


@pytest.mark.parametrize(("change", "message"), PLAIN.values(), ids=PLAIN)
def test_weights_that_do_not_fill_the_model(change, message, tiny):
    edit(tiny, **change)
    with pytest.raises(Refused, match=f"do not fill the model that its config.json describes; {re.escape(message)}$"):
        load_model(tiny)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number(value, int8):
    name = f"{PROJ}.weight_scale"
    edit(int8, tensors={name: damaged(load_file(int8 / "model.safetensors")[name], value)})
    with pytest.raises(Refused, match=f"NaN or infinite: {re.escape(PROJ)}.weight$"):
        load_model(int8)


DISAGREE = {
    "scale-without-format": ({"block": {"ignore": [PROJ, "lm_head"]}}, "but quantization_config leaves it in 16 bits"),
    "format-without-scale": (
        {"drop": [f"{PROJ}.weight_scale"]},
        f"quantization_config quantizes {PROJ}, but {PROJ}.weight is stored as it is",
    ),
    "head-not-ignored": ({"block": {"ignore": []}}, "quantization_config quantizes lm_head, but model.embed_tokens"),
    "no-weight": ({"drop": [f"{PROJ}.weight"]}, f"{PROJ} has weight_scale, but no weight of int8 to go with it"),
    "dtype": (
        {"tensors": {f"{PROJ}.weight": torch.zeros(128, 128, dtype=torch.uint8)}},
        f"{PROJ}.weight is uint8 [128, 128], but its format stores int8 [128, 128]",
    ),
    "shape": (
        {"tensors": {f"{PROJ}.weight_scale": torch.ones(1)}},
        f"{PROJ}.weight_scale is float32 [1], but its format stores bfloat16 [128, 1]",
    ),
    "g_idx": (
        {"tensors": {f"{PROJ}.weight_g_idx": torch.zeros(128, dtype=torch.int32)}},
        f"{PROJ} is int8 and has weight_g_idx as well, which is not read",
    ),
    "zero-point": (
        {"tensors": {f"{PROJ}.weight_zero_point": torch.zeros(128, 1, dtype=torch.int8)}},
        f"{PROJ} is int8 and has weight_zero_point as well, which is not read",
    ),
    "orphan": ({"tensors": {"model.x.input_scale": torch.ones(1)}}, "model.x has input_scale, but no weight of int8"),
    "kv-scale-alone": (
        {"tensors": {"model.layers.0.self_attn.k_scale": torch.ones(1)}},
        "model.layers.0.self_attn.k_scale is a KV-cache scale, but config.json has no kv_cache_scheme",
    ),
    "model-type": ({"config": {"model_type": "novel"}}, "transformers does not know model_type 'novel'"),
    "own-code": (
        {"config": {"model_type": "novel", "auto_map": {"AutoConfig": "novel.Config"}}},
        "set trust_remote_code to run its own code",
    ),
}


@pytest.mark.parametrize(("change", "message"), DISAGREE.values(), ids=DISAGREE)
def test_files_and_configuration_that_disagree(change, message, int8):
    edit(int8, **change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_model(int8)


def test_a_part_of_a_format_is_missing(quantized):
    directory = quantized("llama", make_format("int4", group_size=32, symmetric=False))
    edit(directory, drop=[f"{PROJ}.weight_zero_point"])
    with pytest.raises(
        CheckpointError, match=f"{PROJ} is int4, but weight_zero_point is missing: the checkpoint is not"
    ):
        load_model(directory)


def test_a_shape_the_format_cannot_have(quantized):
    directory = quantized("llama", make_format("fp8-block"))
    edit(directory, tensors={f"{PROJ}.weight": torch.zeros(128, 96, dtype=torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=f"{PROJ} cannot be fp8-block: its 96 columns are not a multiple of"):
        load_model(directory)


def test_a_dtype_that_an_engine_would_round(tiny):
    edit(tiny, config={"dtype": "float16"})
    with pytest.raises(
        Refused, match=r"config.json says float16, but 16 matrices are stored in bfloat16, first model.emb"
    ):
        load_model(tiny)


def test_a_wider_dtype_in_the_configuration_is_no_loss(tiny):
    edit(tiny, config={"dtype": "float32"})
    assert load_model(tiny).formats == {}


def test_a_kv_cache_scheme_is_never_dropped_in_silence(int8):
    edit(int8, block={"kv_cache_scheme": KV})
    with pytest.raises(CheckpointError, match="4 of 4 KV-cache scales are missing"):
        load_model(int8)


def test_only_some_experts_quantized(quantized):
    directory = quantized("qwen3-moe", lambda name: make_format("int8") if ".experts.1." in name else None)
    with pytest.raises(
        Refused, match=r"only some experts of model.layers.0.mlp.experts have quantized inputs: engines"
    ):
        load_model(directory)


def test_gate_and_up_with_different_input_scales(quantized):
    directory = quantized("qwen3-moe", make_format("fp8", strategy="tensor"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = KV  # static, per tensor
    names = [n.removesuffix("_scale") for n in load_file(directory / "model.safetensors") if n.endswith("weight_scale")]
    scales = {n.replace("weight", "input_scale"): torch.tensor([2.0 if "gate" in n else 1.0]) for n in names}
    edit(directory, tensors=scales, config=config)
    with pytest.raises(
        Refused, match=r"experts.0.gate_proj and model.* share one input, but are stored with different"
    ):
        load_model(directory)


def test_an_input_scale_that_is_missing(quantized):
    directory = quantized("llama", make_format("fp8", strategy="tensor"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = KV
    edit(directory, config=config)
    with pytest.raises(CheckpointError, match=r"_proj: the activations need input_scale, one value"):
        load_model(directory)
