"""Cutting a draft out of a target, and what a draft is worth."""

import math

import pytest
import torch

from compress.errors import RecipeError
from distill.draft import build_draft, kept_layers
from distill.speculation import agreement, expected_speedup, simulate, speculate, tokens_per_round


def test_layers_are_taken_evenly_from_first_to_last():
    assert kept_layers(30, 4) == [0, 10, 19, 29] and kept_layers(3, 3) == [0, 1, 2] and kept_layers(9, 1) == [0]
    with pytest.raises(RecipeError, match=r"draft\.layers is 4, but the target has 3 layers: say fewer"):
        kept_layers(3, 4)


def test_all_layers_give_the_target_itself(teacher):
    draft = build_draft(teacher, 2, 24)
    ids = torch.arange(12)[None]
    assert torch.equal(draft(ids).logits, teacher(ids).logits)
    assert next(draft.parameters()).data_ptr() != next(teacher.parameters()).data_ptr()


def test_the_narrowest_channels_go(teacher):
    weak = [1, 5, 7, 20]
    with torch.no_grad():
        for layer in teacher.model.layers:
            layer.mlp.up_proj.weight[weak] *= 1e-9
    draft = build_draft(teacher, 2, 20)
    assert draft.config.intermediate_size == 20 and draft.model.layers[1].mlp.down_proj.weight.shape == (16, 20)
    ids = torch.arange(12)[None]
    torch.testing.assert_close(draft(ids).logits, teacher(ids).logits, atol=1e-5, rtol=0)
    with pytest.raises(RecipeError, match=r"draft\.ffn is 25, but the target has 24 channels: say fewer"):
        build_draft(teacher, 2, 25)


def test_a_shorter_draft_is_the_first_and_last_layers(teacher):
    draft = build_draft(teacher, 1)
    assert draft.config.num_hidden_layers == 1 and len(draft.model.layers) == 1
    assert torch.equal(draft.model.layers[0].mlp.up_proj.weight, teacher.model.layers[0].mlp.up_proj.weight)


def test_rounds_by_hand():
    right = [True, True, False, True, True, True, True, False]
    # guesses of 2: [T T] +1, then the target's own; [T T] +1; [T F]
    found = simulate([right], 2)
    assert (found.rate, found.length) == (pytest.approx(5 / 6), pytest.approx(1 + 5 / 3))
    assert simulate([[False] * 4], 3).length == 1 and simulate([[True] * 8], 3).rate == 1


def test_rounds_of_independent_guesses_follow_the_formula():
    matches = (torch.rand(40, 2000, generator=torch.Generator().manual_seed(0)) < 0.7).tolist()
    for guesses in (1, 3, 6):
        assert simulate(matches, guesses).length == pytest.approx(tokens_per_round(0.7, guesses), rel=0.02)


def test_speedup_of_the_table():
    best = {g: expected_speedup(tokens_per_round(0.8, g), g, 0.1) for g in range(1, 17)}
    assert max(best, key=best.get) == 6 and max(best.values()) == pytest.approx(2.47, abs=0.01)
    assert tokens_per_round(1.0, 4) == 5


def test_agreement_with_oneself_is_whole_and_with_another_is_the_overlap(teacher, student):
    ids = torch.randint(0, 61, (2, 10), generator=torch.Generator().manual_seed(1))
    alpha, same = agreement(teacher, teacher, ids, 4)
    assert alpha == pytest.approx(1, abs=1e-6) and bool(same.all()) and same.shape == (2, 6)
    alpha, _ = agreement(teacher, student, ids, 4)
    with torch.no_grad():
        p, q = (model(ids).logits[:, 3:-1].softmax(-1) for model in (teacher, student))
    assert alpha == pytest.approx(1 - 0.5 * float((p - q).abs().sum(-1).mean()), abs=1e-6)


def test_a_draft_that_is_the_target_guesses_everything(teacher):
    prompts = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(2))
    draft = build_draft(teacher, 2)
    found = speculate(teacher, draft, prompts, 12)
    assert found["acceptance_rate"] == 1 and found["alpha"] == pytest.approx(1, abs=1e-6) and found["tokens"] == 24
    assert draft.generation_config.num_assistant_tokens == found["guesses"]
    assert all(math.isfinite(value) and value > 0 for value in found.values())
