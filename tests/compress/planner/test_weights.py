"""Bytes of weights: real parameter counts, the figures everybody quotes, and the formats' own layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compress.errors import InputError
from compress.planner.engine import GIB
from compress.planner.formats import WEIGHT_FORMATS
from compress.planner.gpus import find_gpu
from compress.planner.model import Model, build_model
from compress.planner.weights import active_parameters, compute_type, decode_read, loaded, on_gpu, share
from quant.formats import make_format

Models = Callable[[str], Model]

# as published in the safetensors metadata of each model; DeepSeek-V3 without its multi-token-prediction layer
PARAMETERS = {
    "DeepSeek-V3": 671_026_404_352,
    "DeepSeek-67B": 67_425_001_472,
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Mistral-7B": 7_241_732_096,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-235B-A22B": 235_093_634_560,
    "SmolLM2-135M": 134_515_008,
    "gemma-3-4b": 4_300_079_472,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_exact_from_the_config_alone(name: str, model: Models) -> None:
    assert model(name).parameters == PARAMETERS[name]


def test_a_7b_in_16_bits(model: Models) -> None:
    """14.6 GB is 2 bytes times the 7.3e9 that is printed on Mistral-7B; its tensors hold 7.2417e9."""
    assert 7.3e9 * 2 == 14.6e9
    assert loaded(model("Mistral-7B"), "bf16") == 14_483_464_192
    assert loaded(model("Mistral-7B"), "bf16") / GIB == pytest.approx(13.49, abs=0.005)
    assert loaded(model("Llama-2-7B"), "bf16") / 1e9 == pytest.approx(13.48, abs=0.005)
    assert loaded(model("Qwen2.5-7B"), "bf16") / 1e9 == pytest.approx(15.23, abs=0.005)


def test_a_120b_against_one_80_gb_card(model: Models) -> None:
    """240 GB is 2 bytes times 120e9; the real one has 233.7 GB. FP8 does not fit on 80 GB, MXFP4 does."""
    assert 120e9 * 2 == 240e9
    oss, card = model("gpt-oss-120b"), find_gpu("H100-80GB").memory * GIB
    assert loaded(oss, "bf16") / 1e9 == pytest.approx(233.66, abs=0.01)
    assert on_gpu(oss, "bf16", 1).low > card
    assert on_gpu(oss, "fp8", 1).low > card
    assert loaded(oss, "fp8") / GIB == pytest.approx(110, abs=0.1)
    assert on_gpu(oss, "stored", 1).high < 0.9 * card
    assert loaded(oss, "stored") / 1e9 == pytest.approx(65.25, abs=0.01)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_format_bytes_are_those_we_write(name: str) -> None:
    shape = (384, 640)
    specs = make_format(name).layout(shape, torch.bfloat16)
    written = sum(spec.nbytes for key, spec in specs.items() if not key.endswith("shape"))
    assert WEIGHT_FORMATS[name].nbytes(*shape) == written


@pytest.mark.parametrize(
    ("name", "bits"),
    [("bf16", 16), ("fp8", 8), ("fp8-block", 8), ("int8", 8), ("int4", 4.125), ("nvfp4", 4.5), ("mxfp4", 4.25)],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    assert WEIGHT_FORMATS[name].nbytes(4096, 4096) * 8 / 4096**2 == pytest.approx(bits, abs=0.005)


def test_ragged_blocks_are_rounded_up() -> None:
    assert WEIGHT_FORMATS["fp8-block"].nbytes(129, 1) == 129 + 2 * 2
    assert WEIGHT_FORMATS["int4"].nbytes(1, 129) == 65 + 2 * 2


def test_embedding_and_head_keep_16_bits(model: Models) -> None:
    llama = model("Llama-3.1-8B")
    tables = 2 * 128256 * 4096
    linears = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336)
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    norms = 65 * 4096
    assert loaded(llama, "fp8") == 2 * tables + linears + 2 * rows + 2 * norms


def test_tensor_parallel_divides_all_but_the_small_rest(model: Models) -> None:
    llama = model("Llama-3.1-8B")
    norms = 2 * 65 * 4096
    whole, half = on_gpu(llama, "bf16", 1).best, on_gpu(llama, "bf16", 2).best
    assert half == (whole - norms) / 2 + norms


def test_decode_reads_no_embedding_but_a_tied_head(model: Models) -> None:
    llama, tied = model("Llama-3.1-8B"), model("Qwen3-4B")
    assert decode_read(llama, "bf16", 1, 1) == loaded(llama, "bf16") - 2 * 128256 * 4096
    assert decode_read(tied, "bf16", 1, 1) == loaded(tied, "bf16")


def test_experts_are_all_resident_and_read_as_they_are_visited(model: Models) -> None:
    oss = model("gpt-oss-120b")
    assert share(oss, 1) == pytest.approx(4 / 128)
    assert share(oss, 10_000) == pytest.approx(1)
    assert decode_read(oss, "bf16", 1, 1) < 0.05 * loaded(oss, "bf16")
    assert active_parameters(oss) / 1e9 == pytest.approx(4.56, abs=0.05)  # 5.1e9 with embedding and head


@pytest.mark.parametrize(
    ("name", "fmt", "compute"),
    [
        ("DeepSeek-V3", "stored", "fp8"),
        ("gpt-oss-120b", "stored", "bf16"),
        ("Llama-3.1-8B", "stored", "bf16"),
        ("Llama-3.1-8B", "fp8", "fp8"),
        ("Llama-3.1-8B", "int4", "bf16"),
    ],
)
def test_what_multiplies(name: str, fmt: str, compute: str, model: Models) -> None:
    assert compute_type(model(name), fmt) == compute


def test_a_moe_is_not_counted_by_its_active_parameters(model: Models) -> None:
    assert loaded(model("DeepSeek-V3"), "fp8-block") / 1e9 == pytest.approx(673, abs=1)


QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
PREFIX = "model.layers.0.mlp.up_proj"
PACKED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "int4-ct": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
        {f"{PREFIX}.weight_packed": ("I32", (128, 8), 4096), f"{PREFIX}.weight_scale": ("BF16", (128, 1), 256)},
        4096 + 256,
    ),
    "int8-ct": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
        {f"{PREFIX}.weight_packed": ("I32", (128, 16), 8192), f"{PREFIX}.weight_scale": ("BF16", (128, 1), 256)},
        8192 + 256,
    ),
    "nvfp4-ct": (
        {"quant_method": "compressed-tensors"},
        {
            f"{PREFIX}.weight_packed": ("U8", (128, 32), 4096),
            f"{PREFIX}.weight_scale": ("F8_E4M3", (128, 4), 512),
            f"{PREFIX}.weight_global_scale": ("F32", (1,), 4),
        },
        4096 + 512 + 4,
    ),
    "fp8": (
        {"quant_method": "fp8"},
        {f"{PREFIX}.weight": ("F8_E4M3", (128, 64), 8192), f"{PREFIX}.weight_scale_inv": ("F32", (1, 1), 4)},
        8192 + 4,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4},
        {f"{PREFIX}.qweight": ("I32", (8, 128), 4096), f"{PREFIX}.scales": ("F16", (1, 128), 256)},
        4096 + 256,
    ),
}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("name", PACKED)
def test_headers_of_quantized_checkpoints_give_the_logical_weights(name: str, key: str) -> None:
    quantization, headers, stored = PACKED[name]
    found = build_model("tiny", {**QWEN3, key: quantization}, headers)
    assert found.parameters == 128 * 64
    assert loaded(found, "stored") == stored
    assert loaded(found, "bf16") == 2 * 128 * 64


def test_gpt_oss_blocks_are_experts() -> None:
    """(experts, out, in / 32, 16 bytes) of two codes each."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    headers = {
        f"{name}_blocks": ("U8", (4, 64, 1, 16), 4096),
        f"{name}_scales": ("U8", (4, 64, 1), 256),
        f"{name}_bias": ("BF16", (4, 64), 512),
    }
    config = {"model_type": "gpt_oss", "num_hidden_layers": 1, "quantization_config": {"quant_method": "mxfp4"}}
    found = build_model("tiny", config, headers)
    assert loaded(found, "stored") == 4096 + 256 + 512
    assert {(weight.role, weight.scale) for weight in found.weights} == {
        ("expert", False),
        ("expert", True),
        ("other", False),
    }
    assert loaded(found, "fp8") == 4 * 64 * 32 + 4 * 64 * 2 + 512


def test_layers_past_the_last_are_multi_token_prediction() -> None:
    headers = {
        "model.layers.0.mlp.up_proj.weight": ("BF16", (8, 8), 128),
        "model.layers.1.mlp.up_proj.weight": ("BF16", (8, 8), 128),
    }
    found = build_model("tiny", QWEN3, headers)
    assert found.parameters == 64
    assert loaded(found, "stored") == 128


def test_unreadable_quantization_is_refused() -> None:
    config = {**QWEN3, "quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(InputError, match="'bitsandbytes' cannot be planned: give the source model"):
        build_model("tiny", config, {"lm_head.weight": ("U8", (8, 1), 8)})
