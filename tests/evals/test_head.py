"""The part after the hidden states, family by family, against the logits of the whole model."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
)

from compress.errors import Refused
from compress.head import final_states, load_head, read_head, save_head

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
FAMILIES = {
    "llama": (LlamaConfig(**SIZES), ()),
    "gemma2": (Gemma2Config(**SIZES, final_logit_softcapping=3.0), (("final_logit_softcapping", 3.0),)),
    "cohere": (CohereConfig(**SIZES, logit_scale=0.25), (("logit_scale", 0.25),)),
    "granite": (GraniteConfig(**SIZES, logits_scaling=8.0), (("logits_scaling", 8.0),)),
    "gpt2": (GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2), ()),
    "opt-projected": (
        OPTConfig(
            vocab_size=61, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=8
        ),
        (),
    ),
}


@pytest.fixture
def build(formula):
    """A model of a family with formula weights."""
    return lambda family, dtype=torch.float32: formula(AutoModelForCausalLM.from_config(FAMILIES[family][0])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_head_gives_the_models_logits(build, family, dtype):
    model = build(family, dtype)
    head = read_head(model)
    assert head.transforms == FAMILIES[family][1] and head.vocabulary == 61
    ids = torch.tensor([[5, 7, 11, 60]])
    with torch.no_grad():
        logits = head.logits(final_states(model, ids))
        torch.testing.assert_close(
            logits, model(ids).logits.float(), rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
    assert logits.dtype == torch.float32


def test_a_transform_that_is_not_known_is_refused(build, monkeypatch):
    monkeypatch.setattr("compress.head.TRANSFORMS", {})
    with pytest.raises(Refused, match=r"^the logits of GraniteForCausalLM do not follow from its final hidden states"):
        read_head(build("granite"))


def test_a_model_without_an_output_head_is_refused():
    encoder = BertModel(BertConfig(hidden_size=8, num_attention_heads=1, intermediate_size=8, num_hidden_layers=1))
    with pytest.raises(Refused, match=r"^BertModel has no output embedding after a decoder, so it cannot be scored"):
        read_head(encoder)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_head_gives_the_same_logits(build, family, tmp_path):
    head = read_head(build(family))
    save_head(head, tmp_path / "head.safetensors")
    again = load_head(tmp_path / "head.safetensors", device=torch.device("cpu"))
    assert (again.transforms, again.vocabulary) == (head.transforms, head.vocabulary)
    states = torch.arange(3.0 * head.project.in_features).reshape(3, -1).sin()
    torch.testing.assert_close(again.logits(states), head.logits(states).detach())


def test_bias_is_kept(build, tmp_path):
    head = read_head(build("llama"))
    biased = nn.Linear(16, 61)
    save_head(type(head)(biased, (), 61), tmp_path / "head.safetensors")
    states = torch.ones(1, 16)
    again = load_head(tmp_path / "head.safetensors", device=torch.device("cpu"))
    torch.testing.assert_close(again.logits(states), biased(states).detach())


def test_only_a_plain_linear_is_kept(build, tmp_path):
    head = read_head(build("llama"))
    with pytest.raises(Refused, match=r"^the output embedding is a Sequential, only a plain Linear can be kept for"):
        save_head(type(head)(nn.Sequential(head.project), (), 61), tmp_path / "head.safetensors")
