"""Tiny models with a real tokenizer, built once per test session; nothing is downloaded."""

import os
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {  # DeepSeek's attention; the first layer is dense, the second has shared and routed experts
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=16),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=16, query_pre_attn_scalar=32),
    "gemma3": lambda: Gemma3TextConfig(**SIZES, sliding_window=16, query_pre_attn_scalar=32),
    "phi3": lambda: Phi3Config(**SIZES, original_max_position_embeddings=512),
    "mixtral": lambda: MixtralConfig(**SIZES, **LOCAL_EXPERTS),
    "qwen2-moe": lambda: Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64),
    "gpt-oss": lambda: GptOssConfig(**SIZES, **LOCAL_EXPERTS, sliding_window=16),
    "deepseek-v3": lambda: DeepseekV3Config(**(SIZES | {"num_key_value_heads": 4}), **LATENT),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable byte, so that any English text encodes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    wanted = ["<unk>", "<s>", "</s>", *sorted(set(string.printable) & set(alphabet)), "Ġ", "Ċ"]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(wanted))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def build_tiny(kind: str, directory: Path, *, dtype: torch.dtype = torch.bfloat16, max_shard_size: str = "5GB") -> Path:
    """Write a tiny random model of an architecture of CONFIGS with its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def pytest_configure() -> None:
    """Tests run side by side, one to a core, so none of them and no process they start takes all cores."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model by architecture; read-only by convention, copy it to change it."""
    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Path:
        return root / kind if (root / kind).exists() else build_tiny(kind, root / kind)

    return get


@pytest.fixture
def tiny(tiny_models: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny Llama of the test's own."""
    return Path(shutil.copytree(tiny_models("llama"), tmp_path / "tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own: nothing of the user's is read or written."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return directory
