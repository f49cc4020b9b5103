"""Activation emulation: bit-equal to compressed-tensors' fake quantization, NaN never becomes a number."""

import pytest
import torch
from bitsandbytes.functional import int8_vectorwise_quant
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from quant.activations import activation_quantizer, round_e2m1

TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
TOKEN_INT8 = {**TOKEN_FP8, "type": "int"}
GROUP_FP8 = {**TOKEN_FP8, "strategy": "group", "group_size": 128}
MXFP8 = {**TOKEN_FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP4 = {**MXFP8, "num_bits": 4}
NVFP4 = {
    **MXFP4,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": "local",
    "scale_dtype": "torch.float8_e4m3fn",
}
STATIC_FP8 = {**TOKEN_FP8, "strategy": "tensor", "dynamic": False}
STATIC_INT8 = {**STATIC_FP8, "type": "int"}

DYNAMIC = {
    "fp8-token": TOKEN_FP8,
    "int8-token": TOKEN_INT8,
    "fp8-group128": GROUP_FP8,
    "mxfp8": MXFP8,
    "mxfp4": MXFP4,
}


def theirs(x, args, scale=None, global_scale=None):
    """compressed-tensors' own forward helpers; `scale` None computes it from x, as its dynamic path does."""
    args = QuantizationArgs(**args)
    if scale is None:
        scale, zero = compute_dynamic_scales_and_zp(
            value=x, args=args, module=torch.nn.Module(), global_scale=global_scale
        )
    else:
        zero = torch.zeros_like(scale)
    return fake_quantize(x=x, scale=scale, zero_point=zero, args=args, global_scale=global_scale)


def inputs(seed=0):
    """(2, 37, 256) with heavy tails, exact ties, zero tokens, and magnitudes from 1e-30 to 1e4."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 37, 256, generator=generator)
    x[0] *= torch.exp(3 * torch.randn(37, 1, generator=generator))
    x[0, :, :4] *= 50
    x[1, 0] = 0
    x[1, 1, :128] = 0
    x[1, 2] *= 1e-30
    x[1, 3] = torch.arange(256) / 16 - 8
    x[1, 4] = torch.arange(256) % 13 - 6.0
    x[1, 5, 0] = 1e4
    return x


@pytest.mark.parametrize("args", DYNAMIC.values(), ids=DYNAMIC)
def test_dynamic_scales_equal_compressed_tensors(args):
    x = inputs()
    assert torch.equal(activation_quantizer(args)(x), theirs(x, args))


@pytest.mark.parametrize("global_scale", [0.5, 37.0, 448 * 6 / 50])
def test_nvfp4_equals_compressed_tensors(global_scale):
    x, gs = inputs(), torch.tensor([global_scale])
    assert torch.equal(activation_quantizer(NVFP4, scale=gs)(x), theirs(x, NVFP4, global_scale=gs))


@pytest.mark.parametrize("args", [STATIC_FP8, STATIC_INT8], ids=["fp8", "int8"])
def test_static_scale_equals_compressed_tensors_and_saturates(args):
    x, scale = inputs(), torch.tensor([0.03])
    ours = activation_quantizer(args, scale=scale)(x)
    assert torch.equal(ours, theirs(x, args, scale=scale))
    assert ours.max() == (448 if args["type"] == "float" else 127) * scale  # 1e4 is far beyond


@pytest.mark.parametrize("args", [*DYNAMIC.values(), NVFP4], ids=[*DYNAMIC, "nvfp4"])
def test_bfloat16_inputs_are_computed_in_float32(args):
    x, scale = inputs().bfloat16(), torch.tensor([3.0]) if args is NVFP4 else None
    ours = activation_quantizer(args, scale=scale)(x)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs(x.float(), args, global_scale=scale).bfloat16())


@pytest.mark.parametrize("args", [*DYNAMIC.values(), NVFP4], ids=[*DYNAMIC, "nvfp4"])
@pytest.mark.parametrize("shape", [(256,), (5, 256), (1, 3, 4, 256)])
def test_the_last_dimension_is_the_only_one_that_counts(args, shape):
    quantize = activation_quantizer(args, scale=torch.tensor([3.0]) if args is NVFP4 else None)
    x = inputs()[0, :12].reshape(-1)[: torch.Size(shape).numel()].reshape(shape)
    rows = torch.stack([quantize(row) for row in x.reshape(-1, 256)]).reshape(shape)
    assert torch.equal(quantize(x), rows)


@pytest.mark.parametrize(
    "args", [*DYNAMIC.values(), NVFP4, STATIC_FP8, STATIC_INT8], ids=[*DYNAMIC, "nvfp4", "static-fp8", "static-int8"]
)
def test_nan_stays_nan(args):
    x = inputs()[0, :4]
    x[1, 7] = float("nan")
    scale = None if args.get("dynamic") is True else torch.tensor([3.0])
    out = activation_quantizer(args, scale=scale)(x)
    assert out[1, 7].isnan()
    assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("args", DYNAMIC.values(), ids=DYNAMIC)
def test_infinity_is_never_a_number(args):
    x = inputs()[0, :2]
    x[0, 3] = float("inf")
    out = activation_quantizer(args)(x)
    assert out[0, 3].isnan()
    assert out[1].isfinite().all()


LLM_INT8 = {**TOKEN_INT8, "llm_int8_threshold": 6.0}


def test_llm_int8_equals_bitsandbytes():
    x = inputs()[:, :, :64].clamp(-60000, 60000)
    x[0, :, 1:] = x[0, :, 1:].clamp(-5, 5)
    x[1] = x[1].clamp(-5, 5)
    half = x.reshape(-1, 64).half()
    codes, largest, outliers = int8_vectorwise_quant(half.clone(), threshold=6.0)
    assert outliers.tolist() == [0]
    expected = codes.float() * largest.unsqueeze(1) / 127
    expected[:, outliers] = x.reshape(-1, 64)[:, outliers]
    assert torch.equal(activation_quantizer(LLM_INT8)(x), expected.reshape(x.shape))


def test_llm_int8_keeps_nan():
    x = inputs()[0, :2, :64].clamp(-5, 5)
    x[0, 3] = float("nan")
    out = activation_quantizer(LLM_INT8)(x)
    assert out[0, 3].isnan() and out[1].isfinite().all()


def test_e2m1_against_a_table_of_neighbours():
    """Slow twin: the nearest grid value, a tie to the one with the even code."""
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    x = torch.arange(-1024, 1025) / 128
    expected = []
    for value in x.tolist():
        best = min(range(8), key=lambda code: (abs(abs(value) - grid[code]), code % 2))
        expected.append(grid[best] if value >= 0 else -grid[best])
    assert round_e2m1(x).tolist() == expected


def test_mx_scale_is_a_power_of_two_with_the_top_in_range():
    x = torch.zeros(1, 32)
    x[0, 0] = 1.76  # mantissa >= 1.75 rounds the exponent up: scale 2 ** (1 - 2)
    assert activation_quantizer(MXFP4)(x)[0, 0] == 2.0  # 1.76 / 0.5 = 3.52 -> 4
    x[0, 0] = 1.74  # scale 2 ** -2: 6.96 saturates at 6
    assert activation_quantizer(MXFP4)(x)[0, 0] == 1.5


@pytest.mark.parametrize(
    ("args", "scale", "message"),
    [
        (STATIC_FP8, None, "the activations need input_scale, one value"),
        (NVFP4, None, "the activations need input_global_scale, one value"),
        (STATIC_FP8, torch.tensor([float("nan")]), "input_scale is nan, not a positive number"),
        (STATIC_FP8, torch.tensor([0.0]), "input_scale is 0.0, not a positive number"),
        (STATIC_FP8, torch.ones(2), "the activations need input_scale, one value"),
        ({**GROUP_FP8, "num_bits": 4}, None, "are not emulated"),
        ({**MXFP8, "group_size": 64}, None, "are not emulated"),
        ({**GROUP_FP8, "group_size": 64}, None, "are not emulated"),
        ({**TOKEN_INT8, "symmetric": False}, None, "are not emulated"),
        ({**TOKEN_INT8, "num_bits": 4}, None, "are not emulated"),
    ],
)
def test_what_is_refused(args, scale, message):
    with pytest.raises(ValueError, match=message):
        activation_quantizer(args, scale=scale)


def test_groups_must_divide_the_inputs():
    with pytest.raises(RuntimeError):
        activation_quantizer(GROUP_FP8)(torch.ones(2, 192))
