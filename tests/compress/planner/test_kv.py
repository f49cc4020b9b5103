"""The KV cache: bytes per token of every kind of attention, blocks, groups, users and context."""

from collections.abc import Callable
from math import ceil
from typing import Any

import pytest

from compress.errors import InputError
from compress.planner.formats import KV_FORMATS
from compress.planner.kv import Layer, Layout, last_true, layout
from compress.planner.model import Model, build_model

Models = Callable[[str], Model]
BF16, FP8, INT8, INT4 = (KV_FORMATS[name] for name in ("bf16", "fp8", "int8", "int4"))
NO_HEADERS = {"lm_head.weight": ("BF16", (1, 1), 2)}  # the cache needs the config only


def cache_of(model: Model, fmt: Any = BF16, tp: int = 1, in_flight: int = 8192) -> Layout:
    found = layout(model, fmt, tp, in_flight=in_flight)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "fmt", "tp", "nbytes"),
    [
        pytest.param("Llama-2-7B", BF16, 1, 32 * 2 * 32 * 128 * 2, id="mha"),
        pytest.param("Llama-3.1-8B", BF16, 1, 131_072, id="gqa"),
        pytest.param("Llama-3.1-8B", BF16, 4, 131_072 // 4, id="gqa-tp4"),
        pytest.param("Llama-3.1-8B", BF16, 16, 131_072 // 8, id="gqa-replicated"),
        pytest.param("Llama-3.1-8B", FP8, 1, 65_536, id="gqa-fp8"),
        pytest.param("Llama-3.1-8B", INT8, 1, 32 * 8 * 2 * (128 + 4), id="gqa-int8-scales"),
        pytest.param("Llama-3.1-8B", INT4, 1, 32 * 8 * 2 * (64 + 4), id="gqa-int4-scales"),
        pytest.param("DeepSeek-V3", BF16, 1, 70_272, id="mla"),
        pytest.param("DeepSeek-V3", BF16, 8, 70_272, id="mla-not-divided"),
        pytest.param("DeepSeek-V3", FP8, 1, 35_136, id="mla-fp8"),
        pytest.param("gpt-oss-120b", BF16, 1, 18 * 2 * 8 * 64 * 2, id="full-layers-only"),
        pytest.param("Qwen3.5-27B", BF16, 1, 16 * 2 * 4 * 256 * 2, id="hybrid-attention-only"),
    ],
)
def test_bytes_per_token(name: str, fmt: Any, tp: int, nbytes: int, model: Models) -> None:
    assert cache_of(model(name), fmt, tp).token_bytes == nbytes


def test_multi_query_keeps_one_head() -> None:
    config = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
    falcon = build_model("falcon", {**config, "multi_query": True, "new_decoder_architecture": False}, NO_HEADERS)
    assert cache_of(falcon).token_bytes == 32 * 2 * 64 * 2


def test_mla_saves_what_its_baseline_costs(model: Models) -> None:
    """The factor depends on what MLA is compared with, so each baseline is named."""
    latent = cache_of(model("DeepSeek-V3")).token_bytes / 61
    assert 2 * 128 * 128 * 2 / latent == pytest.approx(56.9, abs=0.05)  # its own 128 heads as MHA
    assert 2 * 32 * 128 * 2 / latent == pytest.approx(14.2, abs=0.05)  # the MHA of a 32-head 7B
    assert 2 * 8 * 128 * 2 / latent == pytest.approx(3.6, abs=0.05)  # GQA with 8 KV heads
    dense, v2 = (cache_of(model(name)).token_bytes for name in ("DeepSeek-67B", "DeepSeek-V2"))
    assert 1 - v2 * 6 / 16 / dense == pytest.approx(0.933, abs=0.001)  # the paper's 93.3%, with its 6-bit KV


@pytest.mark.parametrize("length", [1, 127, 128, 4096, 131072])
@pytest.mark.parametrize("in_flight", [1024, 8192])
def test_windowed_blocks_count_one_by_one(length: int, in_flight: int, model: Models) -> None:
    """A slow twin: gpt-oss has 18 full and 18 windowed layers, in two groups of 18."""
    cache = cache_of(model("gpt-oss-120b"), in_flight=in_flight)
    full = len(range(0, length, 16))
    window = len(range(0, min(128 - 1 + in_flight, length), 16)) + 1
    assert cache.size == 18
    assert cache.request_blocks(length) == full + window
    assert cache.block_bytes == 18 * 16 * 2 * 8 * 64 * 2


def test_gpt_oss_window_of_128_is_charged_8336_tokens(model: Models) -> None:
    cache = cache_of(model("gpt-oss-120b"))
    assert (cache.request_blocks(131072) - 131072 // 16) * 16 == 8336


def test_a_model_of_windows_only_stops_growing(model: Models) -> None:
    cache = cache_of(model("Mistral-7B-v0.1"))
    assert cache.request_blocks(32768) == ceil((4096 - 1 + 8192) / 16) + 1
    assert cache.request_blocks(16384) == cache.request_blocks(32768)


def test_window_that_is_switched_off_is_none(model: Models) -> None:
    assert all(not group.layer.window for group in cache_of(model("Qwen2.5-7B")).groups)


def test_rare_layers_set_the_group_size(model: Models) -> None:
    """Gemma-3-4b: 5 full and 29 windowed layers make groups of 5, one and six, with one layer of padding."""
    cache = cache_of(model("gemma-3-4b"))
    assert cache.size == 5
    assert sorted((group.layers, group.copies) for group in cache.groups) == [(5, 1), (29, 6)]


@pytest.mark.parametrize(("full", "windowed", "size"), [(3, 2, 2), (5, 4, 5), (13, 12, 13), (10, 30, 10)])
def test_nearly_equal_counts_are_padded_up(full: int, windowed: int, size: int) -> None:
    layer_types = ["full_attention"] * full + ["sliding_attention"] * windowed
    config = {"model_type": "gpt_oss", "num_hidden_layers": full + windowed, "layer_types": layer_types}
    assert cache_of(build_model("mixed", config, NO_HEADERS)).size == size


QWEN35_SMALL = {  # Qwen3.5-0.8B: "Setting attention block size to 544", "Padding mamba page size by 2.64%"
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
}
NEMOTRON = {  # Nemotron-Cascade-2-30B-A3B: block 4176 with an FP8 cache, padding 0.19%
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*EMEM*E",
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32",
}


@pytest.mark.parametrize(
    ("config", "fmt", "block", "padding"),
    [
        pytest.param(QWEN35_SMALL, BF16, 544, 2.64, id="gated-deltanet"),
        pytest.param(NEMOTRON, FP8, 4176, 0.19, id="mamba2"),
    ],
)
def test_attention_blocks_grow_to_a_recurrent_state(config: Any, fmt: Any, block: int, padding: float) -> None:
    cache = cache_of(build_model("hybrid", config, NO_HEADERS), fmt)
    attention = next(group for group in cache.groups if not group.layer.state)
    state = max(group.layer.state for group in cache.groups)
    assert attention.block == block
    assert round(100 * (cache.page / state - 1), 2) == padding


def test_users_and_context_are_the_same_pool(model: Models) -> None:
    cache = cache_of(model("Llama-3.1-8B"))
    room = 50 * 1024**3
    users = cache.users(room, 4096)
    assert users == 100
    assert cache.context(room, users, 131072) == 4096
    assert cache.users(room, cache.context(room, 160, 131072)) >= 160
    assert cache.users(room, cache.context(room, 160, 131072) + 1) < 160
    assert cache.context(room, 1, 131072) == 131072
    assert cache.users(-1.0, 4096) == 0
    assert cache.context(-1.0, 1, 131072) == 0


def test_160_users_on_one_gpu_have_short_contexts(model: Models) -> None:
    """163,168 tokens were measured on an A100-40GB with an 8B: 1,019 for each of 160 users, in blocks of 16 1,008."""
    cache = cache_of(model("Llama-3.1-8B"))
    assert cache.context(163_168 * cache.token_bytes, 160, 131072) == 1008


@pytest.mark.parametrize("limit", [0, 1, 7, 100])
@pytest.mark.parametrize("edge", [-1, 0, 3, 99, 1000])
def test_last_true_is_the_last(limit: int, edge: int) -> None:
    expected = max((n for n in range(limit + 1) if n <= edge), default=0)
    assert last_true(lambda n: n <= edge, limit) == expected


def test_no_engine_keeps_a_latent_in_int8(model: Models) -> None:
    assert layout(model("DeepSeek-V3"), INT8, 1, in_flight=8192) is None


def test_sparse_attention_keeps_an_indexer_key() -> None:
    config = {"model_type": "deepseek_v32", "num_hidden_layers": 61, "first_k_dense_replace": 3}
    sparse = build_model("v3.2", config, NO_HEADERS)
    assert cache_of(sparse).token_bytes == 61 * (576 * 2 + 132)
    assert cache_of(sparse, FP8).token_bytes == 61 * (656 + 132)


def test_layers_that_share_keys_keep_none() -> None:
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 20, "num_kv_shared_layers": 10}
    cache = cache_of(build_model("shared", config, NO_HEADERS))
    assert sum(group.layers for group in cache.groups) == 10


REFUSED = {
    "tp": ({"model_type": "llama", "num_attention_heads": 32}, 3, "tp=3 does not divide the 32 attention heads of m"),
    "keys": (
        {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
        1,
        r"m stores key projections of \[32\] channels where its config says \[64\]",
    ),
    "kind": (
        {"model_type": "zamba2", "num_hidden_layers": 2, "layer_types": ["hybrid", "linear_attention"]},
        1,
        "m has layers of kind 'hybrid', whose cache is not known",
    ),
    "encoder": ({"model_type": "t5"}, 1, "m is an encoder-decoder model: only decoders are planned"),
    "state": (
        {"model_type": "jamba", "num_hidden_layers": 8},
        1,
        "m has recurrent layers whose state is not known",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused(name: str) -> None:
    config, tp, message = REFUSED[name]
    headers = {"model.layers.0.self_attn.k_proj.weight": ("BF16", (32, 128), 8192)} if name == "keys" else NO_HEADERS
    with pytest.raises(InputError, match=message):
        layout(build_model("m", config, headers), BF16, tp, in_flight=8192)


def test_a_layer_without_cache_bytes_is_state() -> None:
    assert Layer(state=10).token_bytes(BF16) == 0
