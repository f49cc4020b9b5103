"""A tiny model in memory with formula weights, its tokenizer, and sample sets from plain strings."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from evals.samples import Sample, SampleSet, samples_digest


def formula_weights(model: PreTrainedModel, scale: float = 0.5) -> PreTrainedModel:
    """Weights from a sine of their index: the same on every machine, and far from uniform predictions."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            ramp = torch.arange(parameter.numel(), dtype=torch.float64) * 0.7 + i
            values = (ramp * ramp % 97).sin() * scale
            parameter.copy_(values.reshape(parameter.shape) + (1.0 if parameter.ndim == 1 else 0.0))
    return model.eval()


@pytest.fixture(scope="session")
def formula() -> Callable[..., PreTrainedModel]:
    """`formula_weights`, for models that a test makes itself."""
    return formula_weights


@pytest.fixture(scope="session")
def model(tiny_models: Callable[[str], Path]) -> PreTrainedModel:
    """A float32 Llama of two layers; read-only by convention."""
    return formula_weights(AutoModelForCausalLM.from_pretrained(tiny_models("llama"), dtype=torch.float32), 0.3)


@pytest.fixture(scope="session")
def untied(tiny_models: Callable[[str], Path]) -> PreTrainedModel:
    """The same with an output head of its own."""
    return formula_weights(AutoModelForCausalLM.from_pretrained(tiny_models("llama-untied"), dtype=torch.float32), 0.3)


@pytest.fixture(scope="session")
def tokenizer(tiny_models: Callable[[str], Path]) -> PreTrainedTokenizerBase:
    """One token per printable byte; no BOS of its own."""
    return AutoTokenizer.from_pretrained(tiny_models("llama"))


@pytest.fixture(scope="session")
def sample_set() -> Callable[..., SampleSet]:
    """A sample set of documents (strings) or problems (pairs of context and target)."""

    def build(*texts: str | tuple[str, str]) -> SampleSet:
        kind = "documents" if isinstance(texts[0], str) else "problems"
        pairs = [("", text) if isinstance(text, str) else text for text in texts]
        samples = tuple(Sample(f"s{i}", *pair) for i, pair in enumerate(pairs))
        return SampleSet("test", kind, "test", samples_digest(samples), samples)

    return build
