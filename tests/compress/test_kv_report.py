"""What the report says about the KV cache and about depth, from plain data."""

import pytest

from compress.amounts import format_change
from compress.kv_report import long_range, sections, token_bytes
from compress.page import PageInput, report_html
from compress.report import report_markdown
from tests.compress.conftest import RUN

SIDE = {"absmax": 12.3456, "scale": [0.0275], "clipped": 0.0}
KV = {
    "scheme": "fp8 (granularity tensor)",
    "serving": "served by vLLM and SGLang",
    "layers": [
        {"layer": 0, "keys": SIDE, "values": SIDE | {"scale": [0.01, 0.02], "clipped": 0.00012}},
        {"layer": 1, "keys": SIDE | {"scale": None, "clipped": None}, "values": SIDE},
    ],
}


def rows(*nll, depth):
    return [{"id": f"recall/eval/{i}/{depth}", "nll": value, "tokens": 7} for i, value in enumerate(nll)]


def test_recall_is_averaged_over_tokens_at_each_depth():
    baseline, variant = (
        rows(1.4, 2.8, depth=0.1) + rows(0.7, depth=0.9),
        rows(2.1, 3.5, depth=0.1) + rows(0.7, depth=0.9),
    )
    found = long_range(None, {"recall": (baseline, variant), "math": ([{"id": "arithmetic/eval/0"}], [{"id": "x"}])})
    assert list(found) == ["recall"]
    first, last = found["recall"]
    assert (first["data"], first["depth"], first["n"]) == ("recall", 0.1, 2)
    assert (first["baseline"], first["variant"]) == pytest.approx((0.3, 0.4))
    assert (last["depth"], last["baseline"]) == (0.9, pytest.approx(last["variant"]))


def test_a_variant_that_stopped_early_is_compared_on_what_it_has():
    (entry,) = long_range(None, {"recall": (rows(1.4, 70.0, depth=0.5), rows(2.8, depth=0.5))})["recall"]
    assert (entry["n"], entry["baseline"], entry["variant"]) == (1, pytest.approx(0.2), pytest.approx(0.4))


def test_nothing_is_said_where_nothing_was_measured():
    assert long_range(None, {}) == {} and sections({}) == []


def test_tables_of_words():
    found = long_range(KV, {"recall": (rows(1.4, depth=0.1), rows(2.1, depth=0.1))})
    cache, recall = sections(found)
    assert cache.text.startswith(
        "The variant was measured with a KV cache in fp8 (granularity tensor), served by vLLM and"
    )
    assert cache.rows == [
        ("0", "12.3", "0.0275", "0", "12.3", "0.01 to 0.02", "0.00012"),
        ("1", "12.3", "–", "–", "12.3", "0.0275", "0"),
    ]
    assert recall.rows[0][:2] == ("recall at 10%", "1") and len(recall.rows[0]) == len(recall.header)


def test_they_are_in_the_report(make_run):
    _, gate = make_run()
    run = {"command": "c", "output": "o", "stages": [], "bytes_before": 2, "bytes_after": 1, "seconds": 1.0}
    text = report_markdown(gate, run | long_range(KV, {"recall": (rows(1.4, depth=0.1), rows(2.1, depth=0.1))}))
    assert "## KV cache\n\nThe variant was measured" in text and "| 0 | 12.3 | 0.0275 | 0 | 12.3 |" in text
    assert "## Recall by depth" in text and "| recall at 10% | 1 |" in text
    assert "KV cache" not in report_markdown(gate, run)
    page = report_html(gate, RUN | {"kv_cache": KV}, PageInput({}))
    assert '<a href="#part-1">KV cache</a>' in page and '<h2 id="part-1">KV cache</h2>' in page


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (100_000, "100.0 kB, 2.00 times smaller"),
        (200_004, "200.0 kB, as before"),
        (400_000, "400.0 kB, 2.00 times larger"),
    ],
    ids=["smaller", "the same but for scales", "larger"],
)
def test_a_change_of_size_in_words(after, text):
    assert format_change(200_000, after) == text


def test_what_shrinks_is_the_cache_of_a_token(make_run):
    layer = {"pattern": "model.layers.*.self_attn", "count": 30, "shape": [6, 64], "becomes": "fp8", "reason": ""}
    layers = [{**layer, "bytes_before": 23_040, "bytes_after": 11_520}]
    run = RUN | {"stages": [{"name": "kv_cache", "summary": "KV cache to fp8", "seconds": 1, "layers": layers}]}
    assert token_bytes(run) == (23_040, 11_520)
    assert token_bytes(RUN) is None
    _, gate = make_run()
    assert "| KV cache of a token | 23.0 kB → 11.5 kB, 2.00 times smaller |" in report_markdown(gate, run)
