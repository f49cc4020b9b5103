"""Scores against a slow twin that takes one sample at a time through the whole model, and against lm-eval."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compress.errors import Refused
from compress.head import read_head
from evals.score import Reading, Reference, _batches, _places, aa_difference, score
from evals.windows import encode, total_tokens

TEXTS = ("A first text.", "b", "The third of these texts is longer than all the others are, by far.", "Four.")
SUMS = (("1 + 1 =", " 2."), ("What is seven times six?", " 42"), ("0", "0" * 30))


@torch.no_grad()
def twin(model, sample, source=None):
    """nll, top1, kl, agree of one sample: float64 log-softmax over the full logits of each window."""
    sums = [0.0] * 4
    for window in sample.windows:
        ids = torch.tensor([window.ids])
        log_q = model(ids[:, :-1]).logits[0].double().log_softmax(-1)[-window.scored :]
        log_p = source(ids[:, :-1]).logits[0].double().log_softmax(-1)[-window.scored :] if source else log_q
        for token, p, q in zip(window.ids[-window.scored :], log_p, log_q, strict=True):
            found = -q[token], q.argmax() == token, (p.exp() * (p - q)).sum(), p.argmax() == q.argmax()
            sums = [total + float(value) for total, value in zip(sums, found, strict=True)]
    return sums


@pytest.fixture(params=["documents", "problems"])
def encoded(request, tokenizer, sample_set):
    texts = TEXTS if request.param == "documents" else SUMS
    return encode(tokenizer, sample_set(*texts), max_length=48)


@pytest.mark.parametrize("batch_tokens", [1, 60, 100_000])
def test_rows_equal_the_slow_twin_for_every_batching(model, encoded, batch_tokens):
    rows = score(model, encoded, reading=Reading(batch_tokens)).rows
    assert [row["id"] for row in rows] == [sample.id for sample in encoded]
    for row, sample in zip(rows, encoded, strict=True):
        nll, top1, _, _ = twin(model, sample)
        assert row == {
            "id": sample.id,
            "hash": sample.hash,
            "tokens": sample.tokens,
            "bytes": sample.size,
            "nll": pytest.approx(nll, rel=1e-5),
            "top1": top1,
        }


def test_chunks_over_tokens_do_not_change_the_rows(model, encoded, monkeypatch):
    whole = score(model, encoded).rows
    monkeypatch.setattr("evals.score.LOGITS", 128 * 5)  # five tokens at a time
    for part, row in zip(score(model, encoded).rows, whole, strict=True):
        assert part == row | {"nll": pytest.approx(row["nll"], rel=1e-6)}


def test_golden_values(model, tokenizer, sample_set):
    rows = score(model, encode(tokenizer, sample_set(*TEXTS), max_length=48)).rows
    assert [row["nll"] for row in rows] == pytest.approx(GOLDEN, rel=1e-4)


GOLDEN = [110.36804, 10.67796, 508.31563, 43.85089]


def test_sums_equal_lm_eval(model, tokenizer, sample_set):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    peer = HFLM(pretrained=model, tokenizer=tokenizer, max_length=48, softmax_dtype="float32", batch_size=2)
    rows = score(model, encode(tokenizer, sample_set(*TEXTS), max_length=48)).rows
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in TEXTS]
    assert [-row["nll"] for row in rows] == pytest.approx(peer.loglikelihood_rolling(requests), rel=1e-5)
    rows = score(model, encode(tokenizer, sample_set(*SUMS), max_length=48)).rows
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in SUMS]
    assert [-row["nll"] for row in rows] == pytest.approx([x for x, _ in peer.loglikelihood(requests)], rel=1e-5)


@pytest.fixture(scope="module")
def variant(model, formula):
    return formula(copy.deepcopy(model), 0.29)


def reference_of(model, encoded):
    kept = score(model, encoded, keep_states=True)
    return Reference(kept.states, read_head(model), tuple(sample.hash for sample in encoded))


@pytest.mark.parametrize("batch_tokens", [1, 100])
def test_divergence_equals_the_slow_twin(model, variant, encoded, batch_tokens):
    reference = reference_of(model, encoded)
    rows = score(variant, encoded, reading=Reading(batch_tokens), reference=reference).rows
    for row, sample in zip(rows, encoded, strict=True):
        nll, top1, kl, agree = twin(variant, sample, model)
        assert (row["top1"], row["agree"]) == (top1, agree)
        assert row["nll"] == pytest.approx(nll, rel=1e-5)
        assert row["kl"] == pytest.approx(kl, rel=1e-4, abs=1e-5)
        assert kl > 1e-3  # or the comparison says nothing


def test_states_are_those_of_the_scored_positions_in_order(model, encoded):
    states = score(model, encoded, reading=Reading(40), keep_states=True).states
    assert states.shape == (sum(sample.tokens for sample in encoded), 128) and states.dtype == torch.float32
    first = encoded[0].windows[0]
    with torch.no_grad():
        own = model.model(torch.tensor([first.ids[:-1]])).last_hidden_state[0, -first.scored :]
    torch.testing.assert_close(states[: first.scored], own)


def test_a_model_does_not_diverge_from_itself(model, encoded):
    rows = score(model, encoded, reference=reference_of(model, encoded)).rows
    assert all(row["agree"] == row["tokens"] and abs(row["kl"]) < 1e-4 for row in rows)


def test_reference_about_other_samples(model, tokenizer, sample_set, encoded):
    other = encode(tokenizer, sample_set("something else"), max_length=48)
    with pytest.raises(Refused, match=r"^the source's hidden states are about other samples or other tokens, score"):
        score(model, encoded, reference=reference_of(model, other))


def test_reference_with_another_vocabulary(model, encoded, formula):
    config = LlamaConfig(vocab_size=130, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    larger = formula(LlamaForCausalLM(config))
    with pytest.raises(Refused, match=r"^the vocabulary has 130 tokens but that of the source has 128, so there is no"):
        score(larger, encoded, reference=reference_of(model, encoded))


def test_nan_names_the_sample(untied, tokenizer, sample_set):
    damaged = copy.deepcopy(untied)
    with torch.no_grad():
        damaged.get_input_embeddings().weight[tokenizer("y")["input_ids"][0]] = math.nan
    encoded = encode(tokenizer, sample_set("aaa aaa", "bbyb", "cc"), max_length=48)
    with pytest.raises(Refused, match=r"^sample 's1' has a loss that is not finite: weights or activations hold NaN"):
        score(damaged, encoded)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_non_finite_weights_are_refused(model, encoded, value):
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.model.layers[1].mlp.down_proj.weight[3] = value
    with pytest.raises(Refused, match=r"^sample 's\d' has a loss that is not finite"):
        score(damaged, encoded)


def test_batches_hold_every_window_once_and_little_padding(tokenizer, sample_set):
    texts = ["x" * (1 + 7 * i % 45) for i in range(60)]
    places = list(_places(encode(tokenizer, sample_set(*texts), max_length=32)))
    batches = list(_batches(places, 128))
    assert sorted(place.start for batch in batches for place in batch) == [place.start for place in places]
    sizes = [[len(place.window.ids) - 1 for place in batch] for batch in batches]
    assert all(max(size) * len(size) <= 128 for size in sizes)
    padded, used = sum(max(size) * len(size) for size in sizes), sum(sum(size) for size in sizes)
    assert padded < 1.1 * used


def test_progress_adds_up(model, encoded):
    seen = []
    score(model, encoded, reading=Reading(50), advance=seen.append)
    assert len(seen) > 1 and sum(seen) == total_tokens(encoded)


def test_aa_difference(model, encoded):
    rows = score(model, encoded).rows
    assert aa_difference(model, encoded, rows, count=2, reading=Reading()) < 1e-5
    rows[1]["nll"] += 0.5 * rows[1]["tokens"]
    assert aa_difference(model, encoded, rows, count=2, reading=Reading()) == pytest.approx(0.5, abs=1e-5)
    assert aa_difference(model, encoded, rows, count=1, reading=Reading()) < 1e-5
