"""Serving figures: the field's definitions on times made up by hand, and the clock on a tiny model."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from evals.serving import Ratio, Round, Timed, compare, ratio, spread, summarize
from evals.stopwatch import random_prompt, time_generation


def timed(start=0.0, ttft=0.2, tpot=0.05, tokens=11):
    return Timed(start, start + ttft, start + ttft + tpot * (tokens - 1), tokens, 64)


def test_tpot_leaves_the_first_token_out():
    request = Timed(start=10.0, first=10.2, last=10.7, tokens=11, prompt=64)
    assert request.ttft == pytest.approx(0.2)
    assert request.tpot == pytest.approx(0.05)  # 0.5 s / 10; with the first token it would be 0.7 / 11 = 0.064
    assert request.e2e == pytest.approx(0.7)
    assert Timed(0, 1, 1, 1, 8).tpot is None


@pytest.mark.parametrize(
    ("start", "first", "last", "tokens"),
    [(1, 0, 2, 3), (0, 2, 1, 3), (0, 1, 2, 0), (0, math.nan, 2, 3), (0, 1, math.nan, 3)],
    ids=["before it was sent", "last before first", "no token", "nan first", "nan last"],
)
def test_times_that_cannot_be(start, first, last, tokens):
    with pytest.raises(ValueError, match=r"^no request is sent at "):
        Timed(start, first, last, tokens, 1)


def test_a_percentile_needs_a_request_beyond_it():
    assert spread([]) is None
    assert spread([3.0]) == {
        "mean": 3.0, "std": None, "lowest": 3.0, "highest": 3.0, "p50": 3.0, "p90": None, "p99": None,
    }  # fmt: skip
    ten = spread(range(1, 11))
    assert (ten["p50"], ten["p90"], ten["p99"]) == (5.5, pytest.approx(9.1), None)
    assert spread(range(101))["p99"] == 99


def test_throughput_is_over_the_wall_of_each_round():
    one = Round((timed(0.0), timed(0.3)))  # 22 tokens in 1.0 s
    two = Round((timed(100.0),), failed=2)  # 11 tokens in 0.7 s; the pause between rounds does not count
    found = summarize([one, two])
    assert found["requests"] == 3
    assert found["failed"] == 2
    assert found["tokens_per_second"] == pytest.approx(33 / 1.7)
    assert found["tpot"]["p50"] == pytest.approx(0.05)
    assert "goodput" not in found


def test_goodput_counts_requests_that_meet_every_target():
    found = [Round((timed(), timed(tpot=0.09), timed(ttft=0.4)))]
    seconds = found[0].seconds
    assert summarize(found, {"ttft": 0.25, "tpot": 0.06})["goodput"] == pytest.approx(1 / seconds)
    assert summarize(found, {"ttft": 0.25})["goodput"] == pytest.approx(2 / seconds)


def test_sides_are_compared_round_by_round():
    speeds = [0.04, 0.05, 0.08]  # the machine slows down; the variant is always twice as fast
    baseline = [Round((timed(tpot=speed),)) for speed in speeds]
    variant = [Round((timed(ttft=0.1, tpot=speed / 2),)) for speed in speeds]
    found = compare(baseline, variant)
    assert found["tpot"] == Ratio(pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5))
    assert found["ttft"].estimate == pytest.approx(0.5)
    assert found["tokens_per_second"].estimate == pytest.approx(2)


def test_one_round_has_no_interval():
    assert ratio([2.0], [1.0]) == Ratio(pytest.approx(0.5), None, None)
    wide = ratio([1.0, 1.0], [0.5, 2.0])
    assert wide.estimate == pytest.approx(1.0)
    assert wide.lower == pytest.approx(1 / wide.upper)
    assert wide.upper == pytest.approx(math.exp(12.7062 * math.log(2)), rel=1e-4)  # t(0.975, 1) x the standard error


def test_a_figure_that_a_side_lacks_is_left_out():
    single = [Round((Timed(0, 1, 1, 1, 8),))]
    assert set(compare(single, single)) == {"ttft", "tokens_per_second"}


def test_generation_is_timed_token_by_token(tiny_models):
    model = AutoModelForCausalLM.from_pretrained(tiny_models("llama"), dtype=torch.float32)
    model.generation_config.eos_token_id = list(range(64))  # half of all tokens would end it, were the length not fixed
    prompt = random_prompt(128, batch=2, tokens=12)
    assert torch.equal(prompt, random_prompt(128, batch=2, tokens=12))
    found = time_generation(model, prompt, tokens=6)
    assert len(found.requests) == 2
    request = found.requests[0]
    assert (request.tokens, request.prompt) == (6, 12)
    assert request.start < request.first < request.last
    assert found.seconds == pytest.approx(request.e2e)
