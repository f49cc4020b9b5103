"""Channel factors: no change is among them, and where inputs are rounded too, their rounding counts."""

import pytest
import torch

from quant.activations import activation_quantizer
from quant.formats import make_format
from quant.methods.blocks import reconstruct
from quant.methods.equalize import equalizing_factor


def layer(rows=24, columns=64, tokens=200):
    """A weight (O, I) and inputs (n, I) of which one channel is far larger than the others."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    inputs = torch.randn(tokens, columns, generator=generator)
    inputs[:, 5] *= 60
    return weight, inputs


def output_error(weight, inputs, fmt, factor):
    """What an engine computes with the factor folded, against the exact output; relative."""
    scaled = weight * factor
    rounded = reconstruct(scaled, fmt, fmt.choose(scaled, None))
    read = activation_quantizer(fmt.activations)(inputs / factor) if fmt.activations else inputs / factor
    exact = inputs @ weight.t()
    return float((read @ rounded.t() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["int8", "mxfp4"])
def test_a_large_channel_of_rounded_inputs_is_moved_into_the_weight(name):
    weight, inputs = layer()
    fmt = make_format(name, activations=True) if name == "mxfp4" else make_format(name)
    energy = inputs.square().mean(dim=0)
    factor, ratio = equalizing_factor(weight, fmt, energy, inputs=inputs, dtype=torch.float32)
    ones = torch.ones(64)
    assert factor[5] > 3 * factor.median()  # dividing the inputs by it makes the channel smaller
    assert ratio < 0.7
    assert output_error(weight, inputs, fmt, factor) < 0.9 * output_error(weight, inputs, fmt, ones)


def test_without_anything_to_even_out_nothing_changes():
    weight, inputs = torch.full((8, 32), 0.5), torch.ones(4, 32)
    fmt = make_format("int4", group_size=32)
    factor, ratio = equalizing_factor(weight, fmt, torch.ones(32), inputs=inputs, dtype=torch.float32)
    assert torch.equal(factor, torch.ones(32)) and ratio == 1


def test_channels_that_are_tied_share_a_factor():
    weight, inputs = layer()
    fmt = make_format("int8")

    def tie(values):
        return values.reshape(2, 32).mean(dim=0).repeat(2)

    factor, _ = equalizing_factor(weight, fmt, inputs.square().mean(dim=0), inputs=inputs, dtype=torch.float32, tie=tie)
    assert torch.equal(factor[:32], factor[32:])
