"""The maths of the methods on single matrices: against slow twins, and never worse than what they start from."""

from dataclasses import replace

import pytest
import torch

from quant.formats import make_format
from quant.methods import METHODS
from quant.methods.blocks import block_sums, reconstruct
from quant.methods.gptq import compensated_importance, factorize, gptq
from quant.methods.propagate import STRENGTH, corrected
from quant.methods.scale_search import search_scales, weighted_error
from quant.methods.solve import output_error, prepare, solve

FORMATS = {
    "int8": ("int8", {}),
    "mxfp4": ("mxfp4", {}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {}),
    "nf4": ("nf4", {}),
    "int4": ("int4", {"group_size": 32}),
    "int4-asymmetric": ("int4", {"group_size": 32, "symmetric": False}),
    "fp8-channel": ("fp8", {}),
    "fp8-tensor": ("fp8", {"strategy": "tensor"}),
}
ROWS, COLUMNS = 24, 192


def formats():
    return pytest.mark.parametrize("fmt", [make_format(n, **o) for n, o in FORMATS.values()], ids=FORMATS)


def problem(seed=0, tokens=400):
    """A bfloat16 weight as float32, its absmax, and the statistics of correlated inputs of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * torch.rand(1, COLUMNS, generator=generator)
    mixing = torch.eye(COLUMNS) + 0.3 * torch.randn(COLUMNS, COLUMNS, generator=generator)
    inputs = torch.randn(tokens, COLUMNS, generator=generator) @ mixing
    inputs = inputs * torch.exp(torch.randn(COLUMNS, generator=generator))
    weight = weight.bfloat16().float()
    return weight, weight.abs().max(), inputs.t() @ inputs / tokens


def rtn(weight, fmt, absmax):
    return fmt.choose(weight.bfloat16(), absmax)


def column(scales, fmt, index):
    """The scales of weight column `index`, as those of a weight with that one column."""
    at = index // (fmt.block[1] or COLUMNS)
    cut = [t[:, at : at + 1] if t is not None and t.dim() == 2 else t for t in (scales.scale, scales.zero_point)]
    return replace(scales, scale=cut[0], zero_point=cut[1])


def textbook_gptq(weight, fmt, scales, hessian, damping):
    """Algorithm 1 of the paper in float64 with the explicit inverse, eliminating one column at a time."""
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    work = weight.double()[:, order]
    damped = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(order))
    inverse = torch.linalg.inv(damped[order][:, order])
    result = torch.empty_like(work)
    for j in range(len(order)):
        one = column(scales, fmt, int(order[j]))
        result[:, j] = fmt.decode(fmt.encode(work[:, j : j + 1].float(), one), one)[:, 0].double()
        error = (work[:, j] - result[:, j]) / inverse[j, j]
        work[:, j:] -= error[:, None] * inverse[j, j:][None, :]
        inverse = inverse - inverse[:, j : j + 1] * inverse[j : j + 1] / inverse[j, j]
    return result[:, torch.argsort(order)].float()


@formats()
def test_gptq_equals_the_textbook_loop(fmt):
    weight, absmax, hessian = problem()
    scales = rtn(weight, fmt, absmax)
    codes, rounded, _ = gptq(weight, fmt, scales, factorize(hessian, damping=0.01))
    expected = textbook_gptq(weight, fmt, scales, hessian, 0.01)
    assert torch.equal(fmt.decode(codes, scales), rounded)
    # a float32 update may land on the other side of a tie; one such code may move its whole row
    assert (rounded != expected).any(dim=1).sum() <= 1


@formats()
def test_gptq_without_correlation_is_round_to_nearest(fmt):
    weight, absmax, _ = problem()
    scales = rtn(weight, fmt, absmax)
    codes, rounded, _ = gptq(weight, fmt, scales, factorize(torch.eye(COLUMNS), damping=0.01))
    assert torch.equal(rounded, reconstruct(weight, fmt, scales))
    assert torch.equal(codes.float(), fmt.encode(weight, scales).float())


@formats()
def test_scale_search_never_loses_to_round_to_nearest(fmt):
    weight, absmax, hessian = problem()
    importance = hessian.diagonal()
    start = rtn(weight, fmt, absmax)
    found = search_scales(weight, fmt, importance, absmax, torch.bfloat16)
    before, after = (weighted_error(weight, fmt, scales, importance) for scales in (start, found))
    assert (after <= before).all()
    if fmt.name != "mxfp8":  # eight bits of float under a power of two leave nothing to search
        assert after.sum() < before.sum()
    assert found.scale.dtype == start.scale.dtype and found.scale.shape == start.scale.shape


@formats()
def test_each_method_lowers_the_output_error_of_the_one_before(fmt):
    weight, absmax, hessian = problem()
    factor = factorize(hessian, damping=0.01)

    def error(rounded):
        return output_error(weight - rounded, hessian).sum()

    start = rtn(weight, fmt, absmax)
    found = search_scales(weight, fmt, factor.importance, absmax, torch.bfloat16)
    _, on_rtn_scales, _ = gptq(weight, fmt, start, factor)
    _, rounded, _ = gptq(weight, fmt, found, factor)
    assert error(rounded) < error(reconstruct(weight, fmt, found))
    assert error(on_rtn_scales) < error(reconstruct(weight, fmt, start))
    assert error(rounded) <= error(on_rtn_scales)


@formats()
def test_learning_starts_at_the_compensated_codes_and_reports_its_own_error(fmt):
    weight, absmax, hessian = problem()
    inputs = prepare(hessian, 400, METHODS["learned"])
    found = solve(weight, fmt, METHODS["learned"], inputs, absmax=absmax, dtype=torch.bfloat16)
    same = found.moved(fmt, found.open.before)
    assert torch.equal(same.rounded, found.rounded)
    assert same.report == found.report
    assert found.moved(fmt, weight).report.error > found.report.error  # nearest to the weights, without compensation


def test_a_column_no_token_activates_keeps_its_weights():
    fmt = make_format("int4", group_size=32)
    weight, absmax, hessian = problem()
    hessian[5] = hessian[:, 5] = 0
    scales = rtn(weight, fmt, absmax)
    factor = factorize(hessian, damping=0.01)
    _, rounded, _ = gptq(weight, fmt, scales, factor)
    assert factor.dead == 1
    assert torch.equal(rounded[:, 5], reconstruct(weight, fmt, scales)[:, 5])


def test_damping_rises_until_the_factorization_succeeds_and_is_reported():
    _, _, hessian = problem()
    lowest = torch.linalg.eigvalsh(hessian.double())[0]
    shifted = hessian - torch.eye(COLUMNS) * (lowest + 0.05 * hessian.diagonal().mean())
    assert factorize(hessian, damping=0.01).damping == 0.01
    assert factorize(shifted, damping=0.01).damping == pytest.approx(0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_statistics_that_are_not_finite_are_refused(value):
    _, _, hessian = problem()
    hessian[3, 4] = value
    with pytest.raises(
        ValueError, match=r"^the input statistics are not finite: the calibration activations hold NaN or inf$"
    ):
        factorize(hessian, damping=0.01)


def test_statistics_that_are_not_positive_are_refused():
    with pytest.raises(ValueError, match=r"^the input statistics are not positive definite even with damping 1$"):
        factorize(torch.eye(4) - torch.ones(4, 4) * 2 + torch.eye(4) * 1.5, damping=0.01)


def test_the_importance_of_a_column_is_its_cost_after_compensation():
    _, _, hessian = problem()
    factor = factorize(hessian, damping=1e-6)
    last = int(factor.order[-1])  # nothing is left to make up for it, so its cost is its own
    torch.testing.assert_close(factor.importance[last], hessian[last, last], rtol=1e-2, atol=0)
    assert (factor.importance <= hessian.diagonal() * 1.01).all()


def test_block_sums_keep_ragged_edges():
    values = torch.ones(5, 7)
    assert block_sums(values, (2, 3)).tolist() == [[6, 6, 2], [6, 6, 2], [3, 3, 1]]
    assert block_sums(values, (None, None)).tolist() == [[35]]
    assert block_sums(values, (1, None)).tolist() == [[7]] * 5


@pytest.mark.parametrize("columns", [5, 64, 192])
def test_the_importance_without_the_inverse_is_the_same(columns):
    hessian = problem()[2][:columns, :columns]
    wanted = factorize(hessian, damping=0.01).importance
    torch.testing.assert_close(compensated_importance(hessian, damping=0.01), wanted, rtol=1e-5, atol=0)


def test_the_factor_inverts_the_damped_statistics():
    _, _, hessian = problem()
    factor = factorize(hessian, damping=0.01)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(COLUMNS)
    ordered = damped[factor.order][:, factor.order]
    torch.testing.assert_close(factor.upper.t() @ factor.upper @ ordered, torch.eye(COLUMNS), rtol=0, atol=1e-3)
    assert torch.equal(factor.upper, factor.upper.triu())


def test_the_corrected_weight_is_on_the_way_to_the_least_squares_one():
    """W* = argmin E |W x' - W* x|^2 by a solver of its own; without drift nothing changes."""
    generator = torch.Generator().manual_seed(1)
    weight, _, _ = problem()
    exact = torch.randn(1000, COLUMNS, generator=generator)
    inputs = exact + 0.2 * torch.randn(1000, COLUMNS, generator=generator) @ torch.rand(COLUMNS, COLUMNS)
    factor = factorize(inputs.t() @ inputs / 1000, damping=1e-7)
    drift = (exact - inputs).t() @ inputs / 1000
    best = torch.linalg.lstsq(inputs.double(), (exact @ weight.t()).double()).solution.t().float()
    wanted = weight + STRENGTH * (best - weight)
    torch.testing.assert_close(corrected(weight, drift, factor), wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(corrected(weight, torch.zeros_like(drift), factor), weight)
