"""Every format against a slow twin in plain Python, one weight at a time, that reads like its definition."""

import itertools
import json
import math
import struct
from collections.abc import Iterator

import pytest
import torch

from quant.elements import largest_magnitude
from quant.format import quantize
from quant.formats import make_format
from quant.formats.nf4 import NF4

Rows = list[list[float]]
E4M3 = [(code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16(x: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]


def nearest(grid: list[float], x: float) -> int:
    size = min(abs(x), grid[-1])
    return min(range(len(grid)), key=lambda code: (abs(grid[code] - size), code % 2))


def e4m3(x: float) -> int:
    return nearest(E4M3, x) | (0x80 if math.copysign(1, x) < 0 else 0)


def e2m1(x: float) -> int:
    return nearest(E2M1, x) | (8 if x < 0 else 0)


def integer(x: float, low: int, high: int) -> int:
    return round(min(max(x, low), high))  # Python rounds half to even


def absmax(values: list[float]) -> float:
    return max(map(abs, values))


def groups(rows: Rows, size: int) -> Iterator[list[float]]:
    return (row[start : start + size] for row in rows for start in range(0, len(row), size))


def bf16_bytes(values: list[float]) -> bytes:
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def nibbles(codes: list[int]) -> bytes:
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


def fp8(rows: Rows) -> dict[str, bytes]:
    scales = [bf16(absmax(row) / 448) or 2.0**-7 for row in rows]
    codes = [e4m3(f32(w / scale)) for row, scale in zip(rows, scales, strict=True) for w in row]
    return {"weight": bytes(codes), "weight_scale": bf16_bytes(scales)}


def fp8_tensor(rows: Rows) -> dict[str, bytes]:
    scale = bf16(absmax([w for row in rows for w in row]) / 448) or 2.0**-7
    return {"weight": bytes(e4m3(f32(w / scale)) for row in rows for w in row), "weight_scale": bf16_bytes([scale])}


def fp8_block(rows: Rows) -> dict[str, bytes]:
    blocks = range(0, len(rows), 128)
    columns = range(0, len(rows[0]), 128)
    scale = {
        (i, j): bf16(absmax([w for row in rows[i : i + 128] for w in row[j : j + 128]]) / 448) or 2.0**-7
        for i, j in itertools.product(blocks, columns)
    }
    codes = [
        e4m3(f32(w / scale[i // 128 * 128, j // 128 * 128])) for i, row in enumerate(rows) for j, w in enumerate(row)
    ]
    return {"weight": bytes(codes), "weight_scale": bf16_bytes([*scale.values()])}


def int8(rows: Rows) -> dict[str, bytes]:
    scales = [bf16(f32(absmax(row) / 127.5)) or 2.0**-7 for row in rows]
    codes = [integer(f32(w / scale), -128, 127) & 255 for row, scale in zip(rows, scales, strict=True) for w in row]
    return {"weight": bytes(codes), "weight_scale": bf16_bytes(scales)}


def int4(rows: Rows) -> dict[str, bytes]:
    scales = [bf16(f32(absmax(group) / 7.5)) or 2.0**-7 for group in groups(rows, 32)]
    pairs = zip(groups(rows, 32), scales, strict=True)
    codes = [integer(f32(w / scale), -8, 7) + 8 for group, scale in pairs for w in group]
    shape = struct.pack("<qq", len(rows), len(rows[0]))
    return {"weight_packed": nibbles(codes), "weight_scale": bf16_bytes(scales), "weight_shape": shape}


def int4_asymmetric(rows: Rows) -> dict[str, bytes]:
    scales, zeros, codes = [], [], []
    for group in groups(rows, 32):
        low, high = min(0.0, *group), max(0.0, *group)
        scale = bf16(f32(bf16(high - low) / 15)) or 2.0**-7
        zero = integer(bf16(-8 - bf16(f32(low / scale))), -8, 7)
        scales.append(scale)
        zeros.append(zero)
        codes += [integer(f32(f32(w / scale) + zero), -8, 7) + 8 for w in group]
    per_row = len(rows[0]) // 32
    columns = [[zero + 8 for zero in zeros[j::per_row]] for j in range(per_row)]  # packed down the rows
    words = [[int.from_bytes(nibbles((column + [0] * 8)[i : i + 8]), "little") for column in columns]
             for i in range(0, len(rows), 8)]  # fmt: skip
    return {
        "weight_packed": nibbles(codes),
        "weight_scale": bf16_bytes(scales),
        "weight_zero_point": b"".join(struct.pack("<I", word) for row in words for word in row),
        "weight_shape": struct.pack("<qq", len(rows), len(rows[0])),
    }


def mx(rows: Rows, grid: list[float], rule: str) -> tuple[list[int], list[float], list[list[float]]]:
    """E8M0 bytes, powers of two, groups divided by them."""
    exponents = []
    for group in groups(rows, 32):
        mantissa, exponent = math.frexp(absmax(group))
        top_mantissa, top_exponent = math.frexp(grid[-1])
        up = {"floor": False, "even": mantissa >= 0.875, "ceil": mantissa > top_mantissa}[rule]
        exponents.append(max(exponent + up - top_exponent, -127) if mantissa else -127)
    scaled = [[w / 2.0**e for w in group] for group, e in zip(groups(rows, 32), exponents, strict=True)]
    return [e + 127 for e in exponents], [2.0**e for e in exponents], scaled


def mxfp4(rows: Rows, rule: str) -> dict[str, bytes]:
    scales, _, scaled = mx(rows, E2M1, rule)
    return {"weight_packed": nibbles([e2m1(x) for group in scaled for x in group]), "weight_scale": bytes(scales)}


def mxfp8(rows: Rows, rule: str) -> dict[str, bytes]:
    scales, _, scaled = mx(rows, E4M3, rule)
    return {"weight": bytes(e4m3(x) for group in scaled for x in group), "weight_scale": bytes(scales)}


def nvfp4(rows: Rows) -> dict[str, bytes]:
    largest = absmax([w for row in rows for w in row])
    divisor = f32(2688 / largest) if largest else 1.0
    scales, codes = [], []
    for group in groups(rows, 16):
        code = e4m3(f32(bf16(f32(absmax(group) / 6)) * divisor)) or e4m3(0.125)
        scales.append(code)
        codes += [e2m1(f32(w / f32(E4M3[code] / divisor))) for w in group]
    return {
        "weight_packed": nibbles(codes),
        "weight_scale": bytes(scales),
        "weight_global_scale": struct.pack("<f", divisor),
    }


def nf4(rows: Rows) -> dict[str, bytes]:
    largest = [absmax(group) for group in groups(rows, 64)]
    bounds = [f32(f32(a + b) / 2) for a, b in itertools.pairwise(map(f32, NF4))]
    codes = []
    for group, top in zip(groups(rows, 64), largest, strict=True):
        inverse = f32(1 / max(top, f32(1e-38)))
        codes += [sum(f32(w * inverse) > bound for bound in bounds) for w in group]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [len(rows), len(rows[0])]}
    return {
        "weight": bytes(high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True)),
        "weight.absmax": struct.pack(f"<{len(largest)}f", *largest),
        "weight.quant_map": struct.pack("<16f", *NF4),
        "weight.quant_state.bitsandbytes__nf4": json.dumps(state).encode(),
    }


def bnb_int8(rows: Rows) -> dict[str, bytes]:
    largest = [absmax(row) for row in rows]
    inverses = [f32(127 / top) if top else 0.0 for top in largest]
    codes = [
        integer(f32(w * inverse), -128, 127) & 255 for row, inverse in zip(rows, inverses, strict=True) for w in row
    ]
    return {"weight": bytes(codes), "SCB": struct.pack(f"<{len(largest)}f", *largest), "weight_format": b"\0"}


TWINS = {
    "bf16": ("bf16", {}, lambda rows: {"weight": bf16_bytes([w for row in rows for w in row])}),
    "fp8": ("fp8", {}, fp8),
    "fp8-tensor": ("fp8", {"strategy": "tensor"}, fp8_tensor),
    "fp8-block": ("fp8-block", {}, fp8_block),
    "int8": ("int8", {}, int8),
    "int4": ("int4", {"group_size": 32}, int4),
    "int4-asymmetric": ("int4", {"group_size": 32, "symmetric": False}, int4_asymmetric),
    "nvfp4": ("nvfp4", {}, nvfp4),
    "nf4": ("nf4", {}, nf4),
    "bnb-int8": ("bnb-int8", {}, bnb_int8),
} | {
    f"{twin.__name__}-{rule}": (twin.__name__, {"exponent": rule}, lambda rows, twin=twin, rule=rule: twin(rows, rule))
    for twin, rule in itertools.product((mxfp4, mxfp8), ("ceil", "even", "floor"))
}


def heavy_tailed() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return ((torch.randn(132, 128, generator=generator) * 2.5).sinh() * 0.01).bfloat16()


def halves_and_zeros() -> torch.Tensor:
    """Multiples of a sixteenth: quotients by a power of two fall on midpoints, the ties; and a row of zeros."""
    weight = ((torch.arange(132 * 128) * 37 % 257 - 128) / 16).reshape(132, 128).bfloat16()
    weight[3] = 0
    return weight


@pytest.mark.parametrize("weights", [heavy_tailed, halves_and_zeros], ids=["heavy-tailed", "ties"])
@pytest.mark.parametrize("case", TWINS)
def test_equal_to_the_twin(case, weights):
    name, options, twin = TWINS[case]
    fmt, weight = make_format(name, **options), weights()
    tensors = quantize(weight, fmt, largest_magnitude(weight) if fmt.absmax_scope else None)
    fast = {suffix: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for suffix, tensor in tensors.items()}
    assert fast == twin(weight.tolist())


# One row of 32 weights: 6, -3, 1.5, ... and zeros. By hand: the scale is 6 over the end of the grid, the codes follow.
GOLDEN = {
    "fp8": {"weight": "7e f6 6e e6 5e d6" + " 00" * 26, "weight_scale": "5b3c"},
    "int8": {"weight": "7f c0 20 f0 08 fc" + " 00" * 26, "weight_scale": "413d"},
    "int4": {
        "weight_packed": "4f 7a" + " 88" * 14,
        "weight_scale": "4d3f",
        "weight_shape": "01 00 00 00 00 00 00 00 20 00 00 00 00 00 00 00",
    },
    "mxfp4": {"weight_packed": "d7 a3 81" + " 00" * 13, "weight_scale": "7f"},
    "mxfp8": {"weight": "7c f4 6c e4 5c d4" + " 00" * 26, "weight_scale": "79"},
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    weight = torch.zeros(1, 32, dtype=torch.bfloat16)
    weight[0, :6] = torch.tensor([6, -3, 1.5, -0.75, 0.375, -0.1875])
    options = {"group_size": 32} if name == "int4" else {}
    tensors = quantize(weight, make_format(name, **options))
    found = {suffix: tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex() for suffix, tensor in tensors.items()}
    assert found == {suffix: data.replace(" ", "") for suffix, data in GOLDEN[name].items()}
