"""Our loader against transformers' default one where that is right, and against explicit arithmetic where it is not."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MixtralConfig

from quant.activations import activation_quantizer
from quant.experts import EmulatedExperts
from quant.formats import make_format
from quant.loader import load_model
from quant.stored import sort_tensors

FORMATS = {
    "fp8": make_format("fp8"),
    "fp8-tensor": make_format("fp8", strategy="tensor"),
    "fp8-block": make_format("fp8-block"),
    "int8": make_format("int8"),
    "int4": make_format("int4", group_size=32),
    "int4-asym": make_format("int4", group_size=32, symmetric=False),
    "mxfp4": make_format("mxfp4"),
    "mxfp4-act": make_format("mxfp4", activations=True),
    "mxfp8": make_format("mxfp8"),
    "nvfp4": make_format("nvfp4"),
    "nf4": make_format("nf4"),
    "bnb-int8": make_format("bnb-int8"),
}
TOKENS = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(0))

# The default load of these fails in float32 ("expected m1 and m2 to have the same dtype"), or computes in bfloat16.
ONLY_BFLOAT16 = ("mxfp4", "mxfp4-act", "mxfp8", "nvfp4", "nf4")


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def theirs(directory, dtype=torch.float32):
    return logits(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype))


def distance(a, b):
    return float((a - b).float().norm() / b.float().norm())


def plain_copy(directory):
    """The same checkpoint with every weight dequantized and no quantization_config: weight-only formats exactly."""
    from compress.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(directory)
    stored = sort_tensors(checkpoint)
    tensors = {f"{name}.weight": module.weight(checkpoint) for name, module in stored.modules.items()}
    tensors |= {name: checkpoint.read(name) for name in stored.plain}
    out = directory.parent / "plain"
    shutil.copytree(directory, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "qwen2", "qwen3", "qwen3-moe"])
def test_plain_checkpoints_load_as_they_are(kind, tiny_models):
    loaded = load_model(tiny_models(kind))
    assert loaded.formats == {} and loaded.kv is None
    assert torch.equal(logits(loaded.model), theirs(tiny_models(kind)))
    assert loaded.tokenizer("ab").input_ids and not loaded.model.training
    tied = loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
    assert tied == (kind in ("llama", "qwen2"))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["fp8", "fp8-tensor", "fp8-block", "int8", "int4"])
def test_equal_to_transformers_in_float32(name, kind, quantized):
    directory = quantized(kind, FORMATS[name])
    loaded = load_model(directory)
    assert loaded.formats == {FORMATS[name].name: 14}
    assert torch.equal(logits(loaded.model), theirs(directory))


@pytest.mark.parametrize("name", ONLY_BFLOAT16)
def test_equal_to_transformers_in_bfloat16(name, quantized):
    directory = quantized("qwen2", FORMATS[name], dtype=torch.bfloat16)
    ours = logits(load_model(directory, dtype=torch.bfloat16).model)
    assert torch.equal(ours, theirs(directory, torch.bfloat16))


def test_close_to_bitsandbytes_int8(quantized, tiny_float32):
    """Its kernel returns float16, which moves a few INT8 roundings of the next layer: well below the format's loss."""
    directory = quantized("llama", FORMATS["bnb-int8"])
    ours = logits(load_model(directory).model)
    assert distance(ours, theirs(directory)) < distance(ours, theirs(tiny_float32("llama"))) / 2


@pytest.mark.parametrize(("name", "dtype"), [("int4", torch.float32), ("mxfp4", torch.bfloat16)])
def test_experts_equal_to_transformers_with_16_bit_inputs(name, dtype, quantized):
    directory = quantized("qwen3-moe", FORMATS[name], dtype=dtype)
    assert torch.equal(logits(load_model(directory, dtype=dtype).model), theirs(directory, dtype))


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("name", ["int4-asym", "nvfp4", "nf4", "mxfp4"])
def test_right_where_transformers_is_not(name, kind, quantized):
    """There asymmetric INT4 and NF4 experts do not load, NVFP4 experts load wrong: the arithmetic itself decides."""
    directory = quantized(kind, FORMATS[name])
    assert torch.equal(logits(load_model(directory).model), theirs(plain_copy(directory)))


def test_transformers_is_still_wrong_about_nvfp4_experts(quantized):
    """When this fails, transformers has mended it: take the row out of the README's table."""
    directory = quantized("qwen3-moe", FORMATS["nvfp4"], dtype=torch.bfloat16)
    ours = logits(load_model(directory, dtype=torch.bfloat16).model)
    assert distance(theirs(directory, torch.bfloat16), ours) > 0.5


@torch.no_grad()
@pytest.mark.parametrize("name", ["fp8", "int8", "mxfp4-act", "mxfp8", "bnb-int8"])
def test_experts_with_rounded_inputs_token_by_token(name, quantized):
    """Slow twin: each token through each of its experts, written out."""
    directory = quantized("qwen3-moe", FORMATS[name])
    loaded = load_model(directory)
    plain = AutoModelForCausalLM.from_pretrained(plain_copy(directory), dtype=torch.float32)
    ours = loaded.model.model.layers[1].mlp.experts
    weights = plain.model.layers[1].mlp.experts
    threshold = {"llm_int8_threshold": 6.0} if name == "bnb-int8" else {}
    rounded = activation_quantizer({**FORMATS[name].activations, **threshold})
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 2], [1, 3], [3, 1]])
    share = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros_like(x)
    for t in range(7):
        for k in range(2):
            gate, up = (rounded(x[t]) @ weights.gate_up_proj[chosen[t, k]].T).chunk(2)
            hidden = rounded(F.silu(gate) * up)
            expected[t] += share[t, k] * (weights.down_proj[chosen[t, k]] @ hidden)
    assert isinstance(ours, EmulatedExperts)
    # float32 sums in another order, and one rounding in thousands that it tips over
    torch.testing.assert_close(ours(x, chosen, share), expected, atol=2e-3 * float(expected.abs().max()), rtol=0)


def test_mixtral_names_find_their_experts(quantized, tmp_path):
    """On disk block_sparse_moe.experts.E.w1, in the model mlp.experts.gate_up_proj."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=3)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixtral")
    directory = quantized(tmp_path / "mixtral", FORMATS["int8"])
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight_scale" in load_file(directory / "model.safetensors")
    model = load_model(directory).model
    assert isinstance(model.model.layers[0].mlp.experts, EmulatedExperts)
    exact = theirs(tmp_path / "mixtral")
    assert 0 < distance(logits(model), exact) < 0.05


def test_mixed_formats_equal_transformers(quantized):
    directory = quantized("llama", lambda name: FORMATS["fp8" if "attn" in name else "int4"])
    loaded = load_model(directory)
    assert loaded.formats == {"fp8": 8, "int4": 6}
    assert torch.equal(logits(loaded.model), theirs(directory))


def test_layers_left_in_16_bits_are_left(quantized):
    directory = quantized("llama", lambda name: FORMATS["int8"] if ".layers.1." in name else None)
    loaded = load_model(directory)
    assert loaded.formats == {"int8": 7}
    assert torch.equal(logits(loaded.model), theirs(directory))


def with_inputs(directory, activations, suffix, scale, dtype=torch.float32):
    """As another tool would write it: the same weights, and inputs of a kind we do not write, with stored scales."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = activations
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    modules = [name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")]
    tensors |= {f"{name}.{suffix}": torch.tensor([scale + i % 3], dtype=dtype) for i, name in enumerate(modules)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_static_fp8_inputs_of_other_tools(quantized):
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    directory = with_inputs(quantized("qwen2", FORMATS["fp8-tensor"]), activations, "input_scale", 0.01)
    assert torch.equal(logits(load_model(directory).model), theirs(directory))


def test_nvfp4_inputs_of_other_tools(quantized):
    activations = {**FORMATS["nvfp4"].weights, "dynamic": "local"}
    directory = quantized("qwen2", FORMATS["nvfp4"], dtype=torch.bfloat16)
    with_inputs(directory, activations, "input_global_scale", 300.0)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    logits(reference)  # decompresses its weights
    ours = load_model(directory, dtype=torch.bfloat16).model
    # same bfloat16 weights, then float32 inputs: in bfloat16 it also rounds the inputs' scales, which no kernel does
    assert torch.equal(logits(ours.float()), logits(torch.nn.Module.float(reference)))


def test_weights_alone_flatter_quantized_inputs(quantized, tiny_float32):
    """Why the inputs are emulated at all: without it MXFP4 x MXFP4 seems as good as MXFP4 x 16 bits."""
    exact = theirs(tiny_float32("llama"))
    both = quantized("llama", FORMATS["mxfp4-act"])
    with_rounding = distance(logits(load_model(both).model), exact)
    weights_only = distance(theirs(plain_copy(both)), exact)
    assert with_rounding > 1.15 * weights_only


def test_sdpa_and_eager_agree(quantized):
    directory = quantized("llama", replace(FORMATS["int4"], activations=None))
    eager = load_model(directory, attn_implementation="eager")
    assert eager.model.config._attn_implementation == "eager"
    torch.testing.assert_close(logits(eager.model), logits(load_model(directory).model), rtol=1e-4, atol=1e-5)
