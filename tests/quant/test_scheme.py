"""config.json's quantization block: valid for compressed-tensors, resolved alike by every reader, and read back."""

import json
import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from torch import nn

from compress.errors import CheckpointError
from quant.formats import make_format
from quant.scheme import formats_of, kv_cache_scheme_of, quantization_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # in vLLM

FORMATS = {
    "fp8": make_format("fp8"),
    "fp8-tensor": make_format("fp8", strategy="tensor"),
    "fp8-block": make_format("fp8-block"),
    "int8": make_format("int8"),
    "int4": make_format("int4"),
    "int4-g32": make_format("int4", group_size=32),
    "int4-asym": make_format("int4", symmetric=False),
    "mxfp4": make_format("mxfp4"),
    "mxfp4-act": make_format("mxfp4", activations=True),
    "mxfp8": make_format("mxfp8"),
    "nvfp4": make_format("nvfp4"),
}


def dense(layers=3):
    """Names of the linears of a Llama."""
    attention = [f"model.layers.{i}.self_attn.{name}" for i in range(layers) for name in ATTENTION]
    return attention, [f"model.layers.{i}.mlp.{name}" for i in range(layers) for name in MLP]


def experts(layers=2, count=11):
    return [f"model.layers.{i}.mlp.experts.{e}.{name}" for i in range(layers) for e in range(count) for name in MLP]


def theirs(config, names):
    """What compressed-tensors attaches to each linear of a model of these names: the weights' arguments, or None."""
    root = nn.Module()
    for name in names:
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        with torch.device("meta"):
            parent.add_module(last, nn.Linear(128, 128, bias=False))
    apply_quantization_config(root, QuantizationConfig(**config))
    schemes = {name: getattr(root.get_submodule(name), "quantization_scheme", None) for name in names}
    return {name: scheme and scheme.model_dump() for name, scheme in schemes.items()}


def vllm_target(config, name, cls):
    """vLLM's rule: ignore, then names and patterns in order, then the parts of a fused layer, then the class."""
    targets = [target for group in config["config_groups"].values() for target in group["targets"]]

    def first(name, entries):
        return next((e for e in entries if (re.match(e[3:], name) if e.startswith("re:") else e == name)), None)

    parent, _, last = name.rpartition(".")
    parts = [f"{parent}.{part}" for part in FUSED.get(last, ())]
    if first(name, config["ignore"]) or (parts and all(first(part, config["ignore"]) for part in parts)):
        return None
    matched = [first(part, targets) for part in parts]
    by_parts = matched[0] if matched and all(matched) else None
    return first(name, targets) or by_parts or next((t for t in targets if t.lower() in cls.lower()), None)


def weights_of(config, target):
    return next(group["weights"] for group in config["config_groups"].values() if target in group["targets"])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_one_format_is_the_class_minus_the_ignored(fmt):
    attention, mlp = dense()
    config = quantization_config([(fmt, attention + mlp)], ["lm_head"])
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert config["ignore"] == ["lm_head"]
    assert config["format"] == fmt.layout_name
    schemes = theirs(config, [*attention, *mlp, "lm_head"])
    assert schemes.pop("lm_head") is None
    assert all(scheme["weights"]["num_bits"] == fmt.weights["num_bits"] for scheme in schemes.values())
    assert vllm_target(config, "model.layers.0.self_attn.qkv_proj", "QKVParallelLinear") == "Linear"
    assert vllm_target(config, "lm_head", "ParallelLMHead") is None


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_what_is_written_is_read_back(fmt):
    attention, mlp = dense()
    config = json.loads(json.dumps({"quantization_config": quantization_config([(fmt, mlp)], attention)}))
    lookup = formats_of(config)
    read = lookup(mlp[0], "Linear")
    assert read.name == fmt.name and read.weights == fmt.weights
    assert (read.activations is None) == (fmt.activations is None)
    assert read.layout((128, 128), torch.bfloat16) == fmt.layout((128, 128), torch.bfloat16)
    assert lookup(attention[0], "Linear") is None
    assert lookup(mlp[0], "Embedding") is None


def test_the_whole_block_is_pinned():
    assert quantization_config([(make_format("fp8"), ["a.b"])], ["lm_head"]) == {
        "quant_method": "compressed-tensors",
        "version": "0.20.1",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "float-quantized",
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
                "output_activations": None,
            }
        },
    }


def test_several_formats_are_resolved_alike_by_every_reader():
    attention, mlp = dense()
    fp8, int4 = make_format("fp8"), make_format("int4")
    config = quantization_config([(fp8, attention), (int4, mlp)], ["lm_head"])
    assert config["format"] == "mixed-precision"
    assert r"re:model\.layers\.\d+\.self_attn\.q_proj$" in config["config_groups"]["group_0"]["targets"]
    schemes = theirs(config, [*attention, *mlp, "lm_head"])
    lookup = formats_of({"quantization_config": config})
    for name in [*attention, *mlp]:
        fmt = fp8 if name in attention else int4
        assert schemes[name]["weights"]["num_bits"] == fmt.weights["num_bits"]
        assert schemes[name]["format"] == fmt.layout_name
        assert lookup(name, "Linear").name == fmt.name
    assert schemes["lm_head"] is None and lookup("lm_head", "Linear") is None
    fused = vllm_target(config, "model.layers.2.self_attn.qkv_proj", "QKVParallelLinear")
    assert weights_of(config, fused) == fp8.weights
    fused = vllm_target(config, "model.layers.2.mlp.gate_up_proj", "MergedColumnParallelLinear")
    assert weights_of(config, fused) == int4.weights


def test_two_group_sizes_share_the_layout_name():
    attention, mlp = dense()
    small = make_format("int4", group_size=32)
    config = quantization_config([(make_format("int4"), attention), (small, mlp)], [])
    assert config["format"] == "pack-quantized"
    assert formats_of({"quantization_config": config})(mlp[0], "Linear").options["group_size"] == 32


def test_a_pattern_never_reaches_into_another_group():
    """Layer 1 differs: no pattern over all layers may be used, and 1 must not match 10 or 11."""
    attention, _ = dense(layers=12)
    special = [name for name in attention if ".layers.1." in name]
    rest = [name for name in attention if name not in special]
    config = quantization_config([(make_format("fp8"), rest), (make_format("int4"), special)], [])
    lookup = formats_of({"quantization_config": config})
    assert {name: lookup(name, "Linear").name for name in attention} == {
        name: "int4" if name in special else "fp8" for name in attention
    }
    assert theirs(config, attention)["model.layers.11.self_attn.q_proj"]["weights"]["num_bits"] == 8


def test_experts_are_one_pattern_and_routers_stay_out():
    attention, _ = dense(layers=2)
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    config = quantization_config([(make_format("fp8"), attention), (make_format("mxfp4"), experts())], routers)
    targets = config["config_groups"]["group_1"]["targets"]
    assert targets == [rf"re:model\.layers\.\d+\.mlp\.experts\.\d+\.{name}$" for name in MLP]
    lookup = formats_of({"quantization_config": config})
    assert {lookup(name, "Linear").name for name in experts()} == {"mxfp4"}
    assert vllm_target(config, routers[0], "ReplicatedLinear") is None
    assert vllm_target(config, "model.layers.1.mlp.experts.0.up_proj", "RoutedExperts") in targets


def test_one_layer_of_experts_that_differs_keeps_a_pattern_per_layer():
    first = [name for name in experts() if ".layers.0." in name]
    second = [name for name in experts() if ".layers.1." in name]
    config = quantization_config([(make_format("fp8"), first), (make_format("mxfp4"), second)], [])
    assert config["config_groups"]["group_0"]["targets"][0] == r"re:model\.layers\.0\.mlp\.experts\.\d+\.gate_proj$"


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("bnb-int8", {"load_in_8bit": True, "llm_int8_threshold": 6.0}),
    ],
)
def test_bitsandbytes_has_a_block_of_its_own(name, keys):
    attention, mlp = dense()
    config = quantization_config([(make_format(name), mlp)], ["lm_head", *attention])
    assert config["quant_method"] == "bitsandbytes" and keys.items() <= config.items()
    assert config["llm_int8_skip_modules"] == ["lm_head", *attention]
    lookup = formats_of({"quantization_config": config})
    assert lookup(mlp[0], "Linear").name == name
    assert lookup(attention[0], "Linear") is None and lookup("model.embed_tokens", "Embedding") is None


def test_formats_without_an_entry_become_ignored():
    config = quantization_config([(make_format("bf16"), ["a"]), (make_format("fp8"), ["b"])], ["c"])
    assert config["ignore"] == ["c", "a"] and config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert quantization_config([(make_format("bf16"), ["a"])], ["c"]) == {}
    assert formats_of({})("a", "Linear") is None


def test_kv_cache_scheme_alone_is_a_dense_checkpoint():
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config = quantization_config([], [], scheme)
    assert config["format"] == "dense" and config["config_groups"] == {}
    assert QuantizationConfig(**config).kv_cache_scheme.num_bits == 8
    assert kv_cache_scheme_of({"quantization_config": config}) == scheme
    assert formats_of({"quantization_config": config})("a", "Linear") is None
    assert kv_cache_scheme_of({}) is None


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("fp8", ["a"]), ("int4", ["a"])], "module 'a' is named twice"),
        ([("fp8", ["ignored"])], "module 'ignored' is named twice"),
        ([("nf4", ["a"]), ("fp8", ["b"])], "bitsandbytes cannot be combined in one checkpoint: nf4, fp8"),
    ],
)
def test_what_cannot_be_written(groups, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        quantization_config([(make_format(name), names) for name, names in groups], ["ignored"])


# As llm-compressor and older tools wrote them, keys and all.
FP8_STATIC = {
    "targets": ["Linear"],
    "weights": {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    },
    "input_activations": {
        "actorder": None,
        "dynamic": False,
        "num_bits": 8,
        "observer": "minmax",
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    },
    "output_activations": None,
}
W4A16 = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
        "actorder": "static",
        "zp_dtype": None,
    },
    "input_activations": None,
    "output_activations": None,
}
NVFP4 = {
    "targets": ["Linear"],
    "format": "nvfp4-pack-quantized",
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    "input_activations": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": "local",
    },
}


def block(group, layout, **more):
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
            **more,
        }
    }


@pytest.mark.parametrize(
    ("group", "layout", "name", "strategy"),
    [
        (FP8_STATIC, "float-quantized", "fp8", "tensor"),
        (FP8_STATIC, "naive-quantized", "fp8", "tensor"),
        (W4A16, "pack-quantized", "int4", None),
        (NVFP4, "mixed-precision", "nvfp4", "tensor_group"),
    ],
    ids=["fp8-static", "naive", "w4a16", "nvfp4-with-inputs"],
)
def test_files_of_other_tools(group, layout, name, strategy):
    fmt = formats_of(block(group, layout))("model.layers.0.mlp.up_proj", "Linear")
    assert fmt.name == name
    assert (fmt.activations or {}).get("strategy") == strategy


def test_exact_name_beats_pattern_beats_class():
    config = block(W4A16, "pack-quantized")
    int8 = {"weights": make_format("int8").weights, "input_activations": make_format("int8").activations}
    config["quantization_config"]["config_groups"] |= {
        "group_1": {"targets": ["re:.*up_proj$"], "format": "int-quantized", **int8},
        "group_2": {**FP8_STATIC, "targets": ["b.up_proj"], "format": "float-quantized"},
    }
    lookup = formats_of(config)
    names = ["a.q_proj", "a.up_proj", "b.up_proj", "lm_head"]
    assert [fmt and fmt.name for fmt in (lookup(name, "Linear") for name in names)] == ["int4", "int8", "fp8", None]


def changed(group, part, **change):
    return {**group, part: {**(group[part] or {}), **change}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not read: give a checkpoint of"),
        (block(W4A16, "pack-quantized", transform_config={"config_groups": {"r": 1}}), "has a transform_config, which"),
        (block(W4A16, "pack-quantized", sparsity_config={"format": "sparse-bitmask"}), "has a sparsity_config, which"),
        (block(W4A16, "pack-quantized", quantization_status="frozen"), "quantization_status is 'frozen': only a"),
        (block(changed(W4A16, "weights", actorder="group"), "pack-quantized"), "reorders columns (actorder 'group')"),
        (block(changed(W4A16, "weights", num_bits=3), "pack-quantized"), 'stores pack-quantized of {"num_bits": 3'),
        (block(changed(W4A16, "weights", novel=1), "pack-quantized"), "group 'group_0' has novel, which is not read"),
        (block(W4A16, "int-quantized"), "stores int-quantized of"),
        (block(W4A16, None), "stores None of"),
        (block(changed(W4A16, "output_activations", num_bits=8), "pack-quantized"), "quantizes outputs, which is not"),
        (block(changed(FP8_STATIC, "input_activations", symmetric=False), "float-quantized"), "which are not emulated"),
        (block(["Linear"], "pack-quantized"), 'is ["Linear"], which names no targets and is not read'),
        (
            {
                "quantization_config": {
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": True,
                    "bnb_4bit_quant_type": "fp4",
                }
            },
            "this bitsandbytes checkpoint is not read: known are",
        ),
    ],
)
def test_what_is_not_read_is_refused(config, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        formats_of(config)
