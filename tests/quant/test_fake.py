"""Weights rounded in use: what the forward pass sees, what the gradient sees, and that nothing is left of it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.errors import RecipeError
from quant.fake import plain_weights, round_weights
from quant.format import dequantize, quantize
from quant.formats import make_format
from quant.plan import plan_quantize


@pytest.fixture
def source(tiny_models):
    return Checkpoint.open(tiny_models("llama"))


def assignments(source, name, **options):
    fmt = make_format(name, **options)
    plan = plan_quantize(source, fmt, targets=["Linear"], ignore=["lm_head"], max_shard_size=10**9)
    return fmt, list(plan.quantized)


@pytest.mark.parametrize(("name", "options"), [("int4", {"group_size": 64}), ("fp8", {}), ("mxfp4", {})])
def test_the_model_computes_with_what_is_stored_and_learns_as_if_not(source, name, options):
    fmt, found = assignments(source, name, **options)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    round_weights(model, found)
    linear = model.model.layers[0].mlp.down_proj
    stored = source.read("model.layers.0.mlp.down_proj.weight")
    expected = dequantize(quantize(stored, fmt), fmt, tuple(stored.shape))
    assert torch.equal(linear.weight, expected)
    assert not torch.equal(expected, stored.float())
    (linear.weight * 3).sum().backward()
    assert bool((linear.parametrizations.weight.original.grad == 3).all())
    plain_weights(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_scale_that_layers_share_is_refused(source):
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    with pytest.raises(RecipeError, match=r"down_proj cannot be trained under nvfp4: leave distill\.quantized out"):
        round_weights(model, assignments(source, "nvfp4")[1])
