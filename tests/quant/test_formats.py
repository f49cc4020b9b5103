"""What every format of the table promises, whatever its grid."""

import itertools
import pickle
from dataclasses import replace

import pytest
import torch

from compress.errors import RecipeError
from quant.elements import largest_magnitude
from quant.format import Format, dequantize, join, quantize, require_finite, stored
from quant.formats import FORMATS, make_format
from quant.methods.blocks import reconstruct

CASES = [  # `activations` changes no byte of the weights
    pytest.param(name, dict(options), id="-".join([name, *(str(value) for _, value in options)]))
    for name, family in FORMATS.items()
    for options in itertools.product(
        *([(key, v) for v in option.allowed] for key, option in family.options.items() if key != "activations")
    )
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS, COLUMNS = 278, 256  # two full runs and a ragged one; a multiple of every group


TAILS = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 3).sinh() * 0.01  # up to 1e3


def heavy_tailed(dtype: torch.dtype, rows: int = ROWS) -> torch.Tensor:
    return TAILS[:rows].to(dtype, copy=True)


WEIGHTS = {
    "heavy-tailed": heavy_tailed,
    "zero": lambda dtype: torch.zeros(ROWS, COLUMNS, dtype=dtype),
    "half-zero": lambda dtype: heavy_tailed(dtype) * (torch.arange(COLUMNS) % 128 < 64),
    "denormal": lambda dtype: heavy_tailed(dtype) * torch.finfo(dtype).tiny,
    "one-value": lambda dtype: torch.full((ROWS, COLUMNS), -0.3, dtype=dtype),
}


def run(fmt: Format, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return quantize(weight, fmt, absmax_of(fmt, weight))


def absmax_of(fmt: Format, weight: torch.Tensor) -> torch.Tensor | None:
    return largest_magnitude(weight) if fmt.absmax_scope else None


def raw(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, options", CASES)
def test_layout_is_what_is_stored(name, options, dtype):
    fmt = make_format(name, **options)
    tensors = run(fmt, heavy_tailed(dtype))
    planned = {suffix: (spec.dtype, spec.shape) for suffix, spec in fmt.layout((ROWS, COLUMNS), dtype).items()}
    assert {suffix: (t.dtype, tuple(t.shape)) for suffix, t in tensors.items()} == planned
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    nbytes = {suffix: spec.nbytes for suffix, spec in fmt.layout((ROWS, COLUMNS), dtype).items()}
    assert {suffix: len(data) for suffix, data in raw(tensors).items()} == nbytes


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name, options", CASES)
def test_unpack_inverts_pack(name, options, kind):
    fmt = make_format(name, **options)
    weight = WEIGHTS[kind](torch.bfloat16)
    scales = fmt.choose(weight, absmax_of(fmt, weight))
    codes = fmt.encode(weight, scales)
    tensors = stored(codes, scales, fmt, (ROWS, COLUMNS), weight.dtype)
    again, scales_again = fmt.unpack(tensors, (ROWS, COLUMNS))
    assert again.dtype == codes.dtype and torch.equal(again, codes)
    assert raw(stored(again, scales_again, fmt, (ROWS, COLUMNS), weight.dtype)) == raw(tensors)


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name, options", CASES)
def test_rounding_without_codes_is_what_codes_decode_to(name, options, kind):
    fmt = make_format(name, **options)
    weight = WEIGHTS[kind](torch.float32)
    scales = fmt.choose(weight, absmax_of(fmt, weight))
    rounded = reconstruct(weight, fmt, scales)
    codes = fmt.encode(weight, scales)
    if fmt.quant_method == "bitsandbytes":  # which multiplies with an inverse in place of dividing
        same = torch.isclose(rounded, fmt.decode(codes, scales), rtol=1e-6, atol=1e-35)
        assert same.float().mean() > 0.999
    else:
        assert torch.equal(rounded, fmt.decode(codes, scales))


@pytest.mark.parametrize("name, options", CASES)
def test_a_format_travels_to_other_processes(name, options):
    fmt = make_format(name, **options)
    weight = heavy_tailed(torch.bfloat16)
    sent = pickle.loads(pickle.dumps(replace(fmt, activations={"num_bits": 8})))
    assert raw(run(sent, weight)) == raw(run(fmt, weight)) and sent.activations == {"num_bits": 8}


@pytest.mark.parametrize("name, options", CASES)
def test_runs_of_rows_join_to_the_whole(name, options):
    fmt = make_format(name, **options)
    weight = heavy_tailed(torch.bfloat16)
    absmax = absmax_of(fmt, weight)
    runs = []
    for rows in weight.split(128):
        scales = fmt.choose(rows, absmax)
        runs.append(fmt.pack(fmt.encode(rows, scales), scales))
    assert raw(join(runs, fmt, (ROWS, COLUMNS), weight.dtype)) == raw(run(fmt, weight))


# Largest error of a weight over the largest magnitude of its group of 128: half the widest step of the grid (INT8
# 1/255, E4M3 1/28 at 448, INT4 1/15, E2M1 1/6 above 4), more where an exponent rule or the scale's rounding clips.
WORST = {"bf16": 0.004, "int8": 0.006, "bnb-int8": 0.005, "fp8": 0.04, "fp8-block": 0.04, "mxfp8": 0.13}
WORST_OF_4_BITS = 0.26


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("name, options", CASES)
def test_error_is_bounded_by_the_grid(name, options, kind):
    fmt = make_format(name, **options)
    weight = WEIGHTS[kind](torch.float32)
    values = dequantize(run(fmt, weight), fmt, (ROWS, COLUMNS))
    assert values.dtype is torch.float32 and values.isfinite().all()
    shared = weight.abs().amax() if fmt.block != (1, fmt.block[1]) or fmt.block[1] is None else None
    absmax = shared if shared is not None else weight.view(ROWS, -1, 128).abs().amax(2, keepdim=True)
    error = (values - weight).abs()
    error = error if shared is not None else error.view(ROWS, -1, 128)
    if kind == "denormal":  # scales underflow, and are replaced: nothing is gained, nothing may blow up
        assert (values.abs() <= 2 * weight.abs().amax()).all()
    else:
        assert (error <= WORST.get(name, WORST_OF_4_BITS) * absmax).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, options", CASES)
def test_one_bad_weight_is_refused(name, options, dtype):
    fmt = make_format(name, **options)
    for bad in (float("nan"), float("inf"), -float("inf")):
        weight = heavy_tailed(dtype, rows=130)
        weight[129, 77] = bad
        with pytest.raises(
            ValueError, match="not finite, so the weight holds NaN or inf, or absmax is not its largest"
        ):
            run(fmt, weight)


@pytest.mark.parametrize("name, absmax", [("nvfp4", 0.5), ("nvfp4", float("nan")), ("nvfp4", float("inf"))])
def test_absmax_that_is_not_the_largest_is_refused(name, absmax):
    with pytest.raises(ValueError, match="is not finite"):
        quantize(torch.ones(128, 64), make_format(name), torch.tensor(absmax))


def test_bfloat16_overflow_is_refused():
    with pytest.raises(ValueError, match="is not finite"):
        quantize(torch.full((1, 8), torch.finfo(torch.float32).max), make_format("bf16"))


@pytest.mark.parametrize("name, options", CASES)
def test_missing_absmax_is_refused(name, options):
    fmt = make_format(name, **options)
    if fmt.absmax_scope is None:
        quantize(heavy_tailed(torch.bfloat16), fmt)
    else:
        with pytest.raises(ValueError, match="needs absmax, the largest magnitude of the w"):
            quantize(heavy_tailed(torch.bfloat16), fmt)


def test_finite_scales_pass():
    fmt = make_format("mxfp4")
    require_finite(fmt.choose(heavy_tailed(torch.bfloat16), None))


@pytest.mark.parametrize(
    "name, options, columns, problem",
    [
        ("int4", {"group_size": 128}, 576, "its 576 columns are not a multiple of 128"),
        ("int4", {"group_size": 64}, 576, None),
        ("fp8-block", {}, 576, "its 576 columns are not a multiple of 128"),
        ("fp8-block", {}, 1536, None),
        ("mxfp4", {}, 48, "its 48 columns are not a multiple of 32"),
        ("mxfp8", {}, 48, "its 48 columns are not a multiple of 32"),
        ("nvfp4", {}, 24, "its 24 columns are not a multiple of 16"),
        ("nf4", {}, 96, "its 96 columns are not a multiple of 64"),
        ("fp8", {}, 7, None),
        ("int8", {}, 7, None),
        ("bf16", {}, 7, None),
    ],
)
def test_shapes_that_do_not_fit(name, options, columns, problem):
    assert make_format(name, **options).problem((13, columns)) == problem


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("fp9", {}, "format 'fp9' is unknown, did you mean 'fp8'?; known: " + ", ".join(FORMATS)),
        ("fp8", {"group_size": 32}, "format 'fp8' has no option 'group_size'; its options: strategy, inputs"),
        ("int4", {"groupsize": 32}, "format 'int4' has no option 'groupsize', did you mean 'group_size'?; its options: "
         "group_size, symmetric"),
        ("int8", {"symmetric": True}, "format 'int8' has no option 'symmetric'; it takes no options"),
        ("int4", {"group_size": 48}, "format 'int4' option 'group_size' is 48; allowed: 32, 64, 128"),
        ("int4", {"symmetric": 1}, "format 'int4' option 'symmetric' is 1; allowed: True, False"),
        ("int4", {"group_size": 1, "symmetric": "no"}, "format 'int4' option 'group_size' is 1; allowed: 32, 64, 128; "
         "format 'int4' option 'symmetric' is 'no'; allowed: True, False"),
    ],
    ids=["name", "option", "misspelt option", "no options", "value", "type", "two at once"],
)  # fmt: skip
def test_wrong_names_are_refused(name, options, message):
    with pytest.raises(RecipeError) as error:
        make_format(name, **options)
    assert str(error.value) == message


@pytest.mark.parametrize("name", FORMATS)
def test_defaults_are_legal_and_bound(name):
    options = FORMATS[name].options
    assert all(option.default in option.allowed for option in options.values())
    fmt = make_format(name)
    assert fmt.name == name
    assert fmt.options == {key: option.default for key, option in options.items()}
