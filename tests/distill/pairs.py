"""Builders of a teacher, a student that is a damaged copy of it, and rows to learn from."""

import copy

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from distill.data import Data, Rows

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def build_teacher() -> PreTrainedModel:
    """A tiny Llama that is surer of itself than a random one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model.eval()


def build_student() -> PreTrainedModel:
    """The teacher with noise in every matrix."""
    model = copy.deepcopy(build_teacher())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def build_rows(steps: int, batch: int) -> Data:
    """Random tokens, of which about a third are not learnt, unevenly over the rows."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, SIZES["vocab_size"], (20, 12), generator=generator)
    learnt = torch.rand(20, 12, generator=generator) < torch.linspace(0.2, 1, 20)[:, None]
    order = torch.arange(steps * batch) % 16
    return Data(Rows(ids[:16], learnt[:16]), order, Rows(ids[16:], learnt[16:]))
