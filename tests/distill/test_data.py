"""Rows, what is learnt of them, and the order they are read in."""

import re

import pytest
import torch

from compress.errors import InputError
from distill.data import Source, TokenText, build_data, pack
from distill.schedule import Schedule, learning_rate, mixed_order


def texts(first, count, length):
    """Texts whose tokens are their number."""
    return [TokenText([first + i] * length) for i in range(count)]


def test_texts_are_joined_and_the_rest_is_cut():
    rows = pack(iter([TokenText([1, 2, 3], given=2), TokenText([4, 5, 6, 7])]), 3, 9)
    assert rows.ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert rows.learnt.tolist() == [[False, False, True], [True, True, True]]
    assert rows.tokens == 3  # the first of a row has nothing before it


def test_no_text_is_learnt_and_held_out():
    source = Source("some", 1.0, texts(0, 10, 5))
    data = build_data([source], length=4, held_out=3, total=8, seed=0)
    assert data.held_out.ids.unique().tolist() == [0, 1, 2]  # 15 tokens fill three rows; the rest of text 2 is dropped
    assert set(data.train.ids.unique().tolist()).isdisjoint({0, 1, 2})
    assert data.order.max() < len(data.train.ids)


def test_rows_come_in_proportion_and_every_row_once_before_any_twice():
    order = mixed_order([6, 20], [3.0, 1.0], 16, seed=0).tolist()
    first = [place for place in order if place < 6]
    for i in range(1, 17):
        assert abs(sum(place < 6 for place in order[:i]) - 0.75 * i) <= 1
    assert sorted(first[:6]) == [0, 1, 2, 3, 4, 5] and sorted(first[6:12]) == [0, 1, 2, 3, 4, 5]
    assert first[:6] != first[6:12]
    assert order == mixed_order([6, 20], [3.0, 1.0], 16, seed=0).tolist()
    assert order != mixed_order([6, 20], [3.0, 1.0], 16, seed=1).tolist()


def test_too_little_text_is_refused():
    message = re.escape(
        "'short' has too little text for rows of 8 tokens to learn from and others held out: give more text or a lower "
        "training.length or held_out"
    )
    with pytest.raises(InputError, match=message):
        build_data([Source("short", 1.0, texts(0, 2, 4))], length=8, held_out=1, total=4, seed=0)


def test_a_source_with_nothing_to_learn_is_refused():
    silent = [TokenText([1, 2, 3, 4], given=4)] * 8
    with pytest.raises(InputError, match="'silent' has too little text"):
        build_data([Source("silent", 1.0, silent)], length=4, held_out=1, total=4, seed=0)


def test_learning_rate_rises_and_falls_along_a_cosine():
    schedule = Schedule(steps=100, batch=1, micro_batch=1, learning_rate=1.0, warmup=0.1, final_rate=0.2)
    rates = torch.tensor([learning_rate(schedule, step) for step in range(101)])
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == 1 == rates.max()
    assert rates[55] == pytest.approx(0.6) and rates[100] == pytest.approx(0.2)
    assert (rates[:10].diff() > 0).all() and (rates[10:].diff() < 0).all()
