"""Our bytes against those of the libraries that read them: compressed-tensors and bitsandbytes.

Compressed-tensors is given float32 weights and our scales: on a CPU it would divide bfloat16 weights in bfloat16, on a
GPU and here it divides in float32.
"""

import itertools

import bitsandbytes
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from quant.elements import e8m0_values, largest_magnitude
from quant.format import Format, Scales, dequantize, quantize
from quant.formats import FORMATS, make_format

ROWS, COLUMNS = 150, 256  # a ragged block, and 150 / 8 words of packed zero points
CASES = [
    pytest.param(make_format(name, **dict(options)), id="-".join([name, *(str(value) for _, value in options)]))
    for name, family in FORMATS.items()
    for options in itertools.product(*([(key, v) for v in option.allowed] for key, option in family.options.items()))
    if make_format(name).quant_method == "compressed-tensors"
]


def heavy_tailed(dtype: torch.dtype) -> torch.Tensor:
    weight = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)) * 3).sinh() * 0.01
    weight[5], weight[6, :16] = 0, -0.0
    return weight.to(dtype)


WEIGHTS = {
    "bfloat16": lambda: heavy_tailed(torch.bfloat16),
    "float32": lambda: heavy_tailed(torch.float32),
    "denormal": lambda: heavy_tailed(torch.bfloat16) * 1e-38,
    "zero": lambda: torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16),
}


def run(fmt: Format, weight: torch.Tensor) -> tuple[Scales, dict[str, torch.Tensor]]:
    absmax = largest_magnitude(weight) if fmt.absmax_scope else None
    return fmt.choose(weight, absmax), quantize(weight, fmt, absmax)


def scheme(fmt: Format) -> QuantizationScheme:
    inputs = QuantizationArgs(**fmt.activations) if fmt.activations else None
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fmt.weights), input_activations=inputs)


def float_scale(fmt: Format, scales: Scales) -> torch.Tensor:
    """The scale as compressed-tensors holds it before it is stored."""
    if scales.scale.dtype is torch.uint8:
        return e8m0_values(scales.scale)
    return scales.scale.float() if scales.scale.dtype is torch.float8_e4m3fn else scales.scale


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("fmt", CASES)
def test_compressed_tensors_compresses_to_the_same_bytes(fmt, kind):
    weight = WEIGHTS[kind]()
    scales, ours = run(fmt, weight)
    state = {"weight": weight.float(), "weight_scale": float_scale(fmt, scales)}
    state |= {} if scales.zero_point is None else {"weight_zero_point": scales.zero_point}
    state |= {} if scales.global_scale is None else {"weight_global_scale": scales.global_scale}
    theirs = BaseCompressor.get_value_from_registry(fmt.layout_name).compress(state, scheme(fmt))
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not same_bytes(ours[name], theirs[name])] == []


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("fmt", CASES)
def test_compressed_tensors_decompresses_to_the_same_weights(fmt, kind):
    _, ours = run(fmt, WEIGHTS[kind]())
    theirs = BaseCompressor.get_value_from_registry(fmt.layout_name).decompress(dict(ours), scheme(fmt))["weight"]
    # it multiplies in the scale's dtype, which rounds the same product once
    assert torch.equal(theirs, dequantize(ours, fmt, (ROWS, COLUMNS)).to(theirs.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [case for case in CASES if "ceil" not in case.id and "floor" not in case.id])
def test_scales_are_those_of_calculate_qparams(fmt, dtype):
    weight = heavy_tailed(dtype)
    weight[5] = 1  # compressed-tensors' zero point of an all-zero group is 0 / 0
    scales, _ = run(fmt, weight)
    rows, columns = fmt.block
    blocks = torch.nn.functional.pad(weight, (0, 0, 0, -ROWS % (rows or ROWS)))
    blocks = blocks.unfold(0, rows or ROWS, rows or ROWS).unfold(1, columns or COLUMNS, columns or COLUMNS)
    low, high = blocks.amin(dim=(2, 3)), blocks.amax(dim=(2, 3))
    divisor = None
    if scales.global_scale is not None:
        divisor = generate_gparam(weight.amin().float(), weight.amax().float())
        assert torch.equal(scales.global_scale, divisor)
    theirs, zero = calculate_qparams(low, high, QuantizationArgs(**fmt.weights), global_scale=divisor)
    assert torch.equal(float_scale(fmt, scales).float(), theirs.float().reshape(scales.scale.shape))
    if scales.zero_point is not None:
        assert torch.equal(scales.zero_point, zero)


def nf4_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return quantize(weight, make_format("nf4"))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_bitsandbytes_quantizes_to_the_same_nf4(kind):
    weight = WEIGHTS[kind]()
    ours = nf4_of(weight)
    packed, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    theirs = {"weight": packed} | {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if not same_bytes(ours[name], theirs[name])] == []


@pytest.mark.parametrize("kind", WEIGHTS)
def test_bitsandbytes_reads_our_nf4(kind):
    ours = nf4_of(WEIGHTS[kind]())
    stats = {name: tensor for name, tensor in ours.items() if name != "weight"}
    weight = bitsandbytes.nn.Params4bit.from_prequantized(ours["weight"], stats, device="cpu")
    theirs = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert torch.equal(theirs, dequantize(ours, make_format("nf4"), (ROWS, COLUMNS)).to(theirs.dtype))


@pytest.mark.parametrize("kind", WEIGHTS)
def test_bitsandbytes_quantizes_to_the_same_int8(kind):
    weight = WEIGHTS[kind]()
    ours = quantize(weight, make_format("bnb-int8"))
    codes, absmax, _ = bitsandbytes.functional.int8_vectorwise_quant(weight)
    assert same_bytes(ours["SCB"], absmax)
    defined = (127 / absmax).isfinite()  # elsewhere it casts infinity or NaN to int8
    assert not ours["weight"][~defined].any()
    assert same_bytes(ours["weight"][defined], codes[defined])
    theirs = bitsandbytes.functional.int8_vectorwise_dequant(ours["weight"], ours["SCB"])
    assert torch.equal(theirs, dequantize(ours, make_format("bnb-int8"), (ROWS, COLUMNS)))
    assert ours["weight_format"].item() == 0
