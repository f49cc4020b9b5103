"""The maths against slow twins: greedy removal by least squares from scratch, the refit by an augmented system."""

import itertools

import pytest
import torch

from prune.obs import DAMPING, SELECTING, Units, columns_of, refit, select_obs
from prune.scores import activation_score, random_score, top_units


def problem(columns=12, rows=5, tokens=200):
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    inputs = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ mix
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, inputs, inputs.t() @ inputs / tokens


def twin_refit(weight, inputs, columns, fraction=DAMPING):
    """The same least squares with the damping as extra rows of data."""
    damping = fraction * (inputs.square().sum(dim=0) / len(inputs)).mean()
    data = torch.cat([inputs, (damping * len(inputs)).sqrt() * torch.eye(inputs.shape[1], dtype=inputs.dtype)])
    return torch.linalg.lstsq(data[:, columns], data @ weight.t()).solution.t(), data


def test_the_refit_is_the_least_squares_solution():
    weight, inputs, hessian = problem()
    columns = torch.tensor([0, 2, 3, 7, 9, 11])
    expected, _ = twin_refit(weight, inputs, columns)
    torch.testing.assert_close(refit(weight, hessian, columns), expected, rtol=1e-9, atol=1e-9)


def test_keeping_every_column_changes_nothing():
    weight, _, hessian = problem()
    torch.testing.assert_close(refit(weight, hessian, torch.arange(12)), weight, rtol=1e-9, atol=1e-9)


def test_columns_without_inputs_go_first_and_change_nothing():
    weight, inputs, _ = problem()
    inputs[:, [1, 4, 8]] = 0
    hessian = inputs.t() @ inputs / len(inputs)
    kept = select_obs(weight, hessian, Units(12), 9)
    assert kept.tolist() == [0, 2, 3, 5, 6, 7, 9, 10, 11]
    torch.testing.assert_close(refit(weight, hessian, kept), weight[:, kept], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "units", [Units(12), Units(6, 2), Units(6, 2, 3)], ids=["columns", "pairs", "pairs in sections"]
)
def test_each_step_removes_what_least_squares_from_scratch_would(units):
    weight, inputs, hessian = problem()
    section = torch.arange(units.count) // (units.count // units.sections)
    alive, quota = [*range(units.count)], [1] * units.sections if units.sections > 1 else [3]
    while any(quota):
        errors = {}
        for unit in (u for u in alive if quota[section[u]]):
            columns = columns_of(torch.tensor([u for u in alive if u != unit]), units.size)
            solution, data = twin_refit(weight, inputs, columns, SELECTING)
            errors[unit] = float((data @ weight.t() - data[:, columns] @ solution.t()).square().sum())
        worst = min(errors, key=errors.get)
        alive.remove(worst)
        quota[section[worst]] -= 1
    assert select_obs(weight, hessian, units, len(alive)).tolist() == alive


def test_the_refit_beats_every_choice_of_plain_columns_on_its_own_data():
    weight, inputs, hessian = problem(columns=6)

    def error(columns, new):
        return float((inputs @ weight.t() - inputs[:, columns] @ new.t()).square().mean())

    kept = select_obs(weight, hessian, Units(6), 4)
    plain = min(error(list(c), weight[:, list(c)]) for c in itertools.combinations(range(6), 4))
    assert error(kept, refit(weight, hessian, kept)) < plain


def test_inputs_that_are_all_zero_are_refused():
    with pytest.raises(ValueError, match="the inputs are all zero or not finite"):
        refit(torch.ones(2, 3), torch.zeros(3, 3), torch.arange(2))


def test_the_highest_scores_stay_equally_many_of_each_section():
    units = Units(4, 2, 2)
    scores = activation_score(torch.tensor([9.0, 16, 0, 1, 4, 0, 0, 1]), units)
    assert scores.tolist() == [5, 1, 2, 1]
    assert top_units(scores, units, 2).tolist() == [0, 2]
    assert torch.equal(random_score(units, 3), random_score(units, 3))
    assert not torch.equal(random_score(units, 3), random_score(units, 4))
