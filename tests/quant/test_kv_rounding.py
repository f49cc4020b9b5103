"""The rounding of keys and values against slow twins, number by number, and the table of schemes."""

import pytest
import torch

from compress.errors import RecipeError
from quant.kv import rounding
from quant.kv.schemes import SCHEMES, make_scheme

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ALL = {
    "fp8": make_scheme("fp8"),
    "fp8-head": make_scheme("fp8", granularity="head"),
    "int8": make_scheme("int8"),
    "int4": make_scheme("int4"),
    "int4-token": make_scheme("int4-token"),
    "nvfp4": make_scheme("nvfp4"),
}


def states(heads=2, tokens=64, dim=32, seed=0):
    """Keys-like numbers: channels of very different size, and one outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, heads, tokens, dim, generator=generator) * torch.linspace(0.05, 4, dim)
    x[0, 0, 1, 5] = 40.0
    return x


def scale_of(scheme, x):
    if scheme.scale_shape is None:
        return None
    shape = scheme.scale_shape(x.shape[1])
    absmax = x.abs().amax((0, 2, 3)) if len(shape) == 3 else x.abs().amax()
    return absmax.reshape(shape) / 448


def e4m3_grid():
    """Every non-negative value of E4M3, from the definition in OFP8."""
    normal = [2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8)]
    return torch.tensor([2.0**-6 * m / 8 for m in range(8)] + normal[:-1])  # the last code is NaN


def nearest(value, grid):
    """Nearest of the grid to |value|, ties to the even index."""
    distance = (grid - abs(value)).abs()
    best = [i for i in range(len(grid)) if distance[i] == distance.min()]
    return float(grid[min(best, key=lambda i: i % 2)]) * (-1 if value < 0 else 1)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_fp8_is_the_nearest_multiple_of_the_scale(granularity):
    scheme = make_scheme("fp8", granularity=granularity)
    x = states(tokens=3, dim=16)
    scale = scale_of(scheme, x)
    found = scheme.keys(x, scale)
    for b, h, t, d in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        s = float(scale.flatten()[h if granularity == "head" else 0])
        assert float(found[b, h, t, d]) == pytest.approx(nearest(float(x[b, h, t, d] / s), e4m3_grid()) * s, rel=1e-6)


def test_fp8_clips_at_448_scales_and_never_overflows():
    x = torch.tensor([400.0, 448.0, 463.9, 500.0, -1e9]).reshape(1, 1, 1, 5)
    found = rounding.fp8(x, torch.tensor([1.0]))
    assert found.flatten().tolist() == [384.0, 448.0, 448.0, 448.0, -448.0]  # 400 is a tie, and 384 is even
    assert rounding.fp8(x, torch.tensor([0.5])).abs().max() == 224.0


def test_fp8_without_a_scale():
    with pytest.raises(ValueError, match=r"^an FP8 cache needs a scale$"):
        rounding.fp8(states(), None)


def test_int8_has_one_scale_per_token_and_head():
    x = states()
    found = rounding.int8(x)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        row = x[b, h, t]
        step = row.abs().max() / 127
        torch.testing.assert_close(found[b, h, t], (row / step).round() * step)


@pytest.mark.parametrize(("function", "dim"), [(rounding.int4_by_token, -1), (rounding.int4_by_channel, -2)])
def test_int4_groups_lie_along_channels_or_tokens(function, dim):
    x = states()
    found = function(x, 16).movedim(dim, -1)
    rows = x.movedim(dim, -1)
    for start in range(0, rows.shape[-1], 16):
        part = rows[..., start : start + 16]
        low = part.amin(-1, keepdim=True).half().float()
        step = ((part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)) / 15).half().float()
        wanted = ((part - low) / step).round().clamp(0, 15) * step + low
        torch.testing.assert_close(found[..., start : start + 16], wanted)
        assert (part - wanted).abs().le(0.51 * step + 0.01 * part.abs().amax(-1, keepdim=True)).all()


def test_nvfp4_blocks_are_e2m1_times_an_e4m3_scale():
    x = states(tokens=2)
    found = rounding.nvfp4(x)
    blocks, got = x.reshape(-1, 16), found.reshape(-1, 16)
    for block, values in zip(blocks, got, strict=True):
        scale = nearest(float(block.abs().max() / 6), e4m3_grid())
        wanted = [nearest(float(v) / scale, torch.tensor(E2M1)) * scale for v in block]
        assert values.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("scheme", ALL.values(), ids=ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shape_dtype_and_zeros(scheme, dtype):
    x = states().to(dtype)
    x[1] = 0
    for side in (scheme.keys, scheme.values):
        found = side(x, scale_of(scheme, states()))
        assert found.shape == x.shape and found.dtype == dtype
        assert (found[1] == 0).all() and found.isfinite().all()


@pytest.mark.parametrize("scheme", ALL.values(), ids=ALL)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_nan_stays_and_infinity_stays_or_saturates(scheme, value):
    x = states()
    x[0, 0, 0, 0] = value
    found = scheme.keys(x, scale_of(scheme, states()))
    saturates = scheme.name in ("fp8", "nvfp4") and value == float("inf")
    assert bool(found.isfinite().all()) == saturates


def test_error_grows_as_bits_shrink():
    x = states(heads=4, tokens=256, seed=3)
    order = ["int8", "fp8", "int4", "int4-token", "nvfp4"]
    errors = []
    for name in order:
        scheme = ALL[name]
        sides = [side(x, scale_of(scheme, x)) for side in (scheme.keys, scheme.values)]
        errors.append(sum(float((side - x).pow(2).mean()) for side in sides))
    assert errors == sorted(errors)
    assert [ALL[name].bits(64) for name in ("int8", "fp8", "int4", "nvfp4")] == [8.5, 8, 5, 4.5]


def test_channels_with_an_offset_are_better_rounded_per_channel():
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0)) + torch.linspace(-20, 20, 32)
    by_channel, by_token = (f(x, 32) - x for f in (rounding.int4_by_channel, rounding.int4_by_token))
    assert by_channel.pow(2).mean() < by_token.pow(2).mean() / 10


def test_who_serves_what():
    served = {name: scheme.serving for name, scheme in ALL.items()}
    assert served == {
        "fp8": "served by vLLM and SGLang",
        "fp8-head": "served by vLLM with FlashAttention 3",
        **dict.fromkeys(
            ("int8", "int4", "int4-token", "nvfp4"), "emulated only: no engine serves it from a checkpoint"
        ),
    }
    assert all(bool(scheme.served) == (scheme.arguments is not None) for scheme in ALL.values())


def test_arguments_are_compressed_tensors_own():
    from compressed_tensors.quantization import QuantizationArgs

    for name, strategy in {"fp8": "tensor", "fp8-head": "attn_head"}.items():
        read = QuantizationArgs(**ALL[name].arguments)
        assert (read.num_bits, read.type, read.strategy, read.dynamic) == (8, "float", strategy, False)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fp9", {}, r"^scheme 'fp9' is unknown, did you mean 'fp8'\?; known: fp8, int8, int4, int4-token"),
        ("fp8", {"group_size": 32}, r"^scheme 'fp8' has no option 'group_size'; its options: granularity$"),
        ("int8", {"residual": 32}, r"^scheme 'int8' has no option 'residual'; it takes no options$"),
        ("fp8", {"granularity": "token"}, r"option 'granularity' is 'token'; allowed: tensor, head$"),
        ("int4", {"group_size": 64}, r"^residual 32 is below group_size 64: tokens wait until a group is full$"),
        ("int4", {"group_size": True}, r"option 'group_size' is True; allowed: 32, 64, 128$"),
    ],
)
def test_schemes_that_there_are_not(name, options, message):
    with pytest.raises(RecipeError, match=message):
        make_scheme(name, **options)


def test_every_family_builds_with_its_defaults():
    assert {make_scheme(name).name for name in SCHEMES} == set(SCHEMES)
