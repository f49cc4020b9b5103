"""report.html as a document: what it says, that it escapes, and that a keyboard and a screen reader get through it."""

import math
import re
from collections import Counter
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import pytest

from compress.page import PageInput, report_html
from compress.pictures import Interval, forest, scatter
from compress.sample_view import views, worst

GATE = {"verdict": "PASS", "exit_code": 0, "reason": "", "warnings": [], "alpha": 0.05, "compress": "0", "metrics": [],
        "binds": {"variant_manifest": "aa", "baseline_manifest": "bb", "plan": "cc"}}  # fmt: skip
METRIC = {"id": "text", "kind": "log_perplexity", "data": "docs", "required": True, "n": 3, "baseline": 2.0,
          "variant": 2.01, "loss": 0.01, "lower": 0.005, "upper": 0.015, "margin": math.log(1.03), "verdict": "PASS",
          "reason": "why"}  # fmt: skip
RUN = {"command": "compress run recipe=a.yaml", "source": "demo", "output": "out/a", "stages": [], "bytes_before": 4,
       "bytes_after": 2, "seconds": 1.0}  # fmt: skip
ATTACK = "</blockquote><script>alert(1)</script><img src=//evil.example/x onerror=alert(1)>\"'&"


class Page(HTMLParser):
    """The elements of a page in order, with their text."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, **dict(attrs), "text": "", "in": [found["tag"] for found in self.open]}
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, **dict(attrs), "text": "", "in": []})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


def rows(shift=0.01, **fields):
    return [
        {"id": f"d{i}", "hash": "h", "tokens": 100, "nll": 200.0 + 100 * shift * i, "agree": 90, **fields}
        for i in range(3)
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory, write_run):
    directory = tmp_path_factory.mktemp("page") / "run"
    write_run(directory, 0.005, texts={"docs": {"d1": f"the text of d1 {ATTACK}"}})
    return (directory / "evidence" / "report.html").read_text()


def test_the_page_is_well_formed_and_complete(report):
    page = Page(report)
    assert page.open == []
    assert [element["text"] for element in page.all("h2")] == [
        "Metrics",
        "Samples",
        "Size and cost",
        "Layers",
        "Reproduce",
    ]
    assert page.all("h1")[0]["text"] == "PASS"
    text = page.all("body")[0]["text"]
    for words in (
        "Every required metric shows a loss below its margin.",
        "With 95% confidence",
        "2.00 times smaller",
        "compress run recipe=int8.yaml",
        "compress verify out/int8",
        "model.layers.*.mlp.down_proj ×30",
        "8.02",  # bits per weight: 8 * 26 600 000 / (30 * 576 * 1536)
        "in ignore",
        "the text of d1",
    ):
        assert words in text


def test_what_comes_from_outside_is_text(report):
    page = Page(report)
    assert page.all("script") == page.all("img") == []
    assert ATTACK in page.all("body")[0]["text"]


def test_hostile_names_stay_text_everywhere():
    stage = {"name": "s", "summary": ATTACK, "seconds": 1.0, "layers": [
        {"pattern": ATTACK, "count": 1, "shape": [2, 2], "becomes": ATTACK, "reason": reason, "bytes_before": 8,
         "bytes_after": 2} for reason in ("", ATTACK)],
        "report": {"blocks": [{"layers": {ATTACK: {"error": 0.1, "nearest": 0.2, "tokens": 9}}}]}}  # fmt: skip
    run = RUN | {"command": ATTACK, "source": ATTACK, "output": ATTACK, "stages": [stage]}
    gate = GATE | {"metrics": [METRIC | {"id": ATTACK, "reason": ATTACK, "data": ATTACK}], "warnings": [ATTACK]}
    sides = rows(text=ATTACK), rows(0.02, text=ATTACK)
    found = PageInput({ATTACK: sides}, {ATTACK: {"d1": ATTACK}}, {"python": ATTACK}, [{"when": ATTACK}])
    page = Page(report_html(gate, run, found))
    assert page.open == [] and page.all("script") == page.all("img") == []
    expected = {"a", "code", "svg", "td", "th", "blockquote", "caption", "p", "h3", "strong", "li"}
    assert expected <= {element["tag"] for element in page.elements}


def test_no_link_leaves_the_page(report):
    page = Page(report)
    ids = {element["id"] for element in page.elements if element.get("id")}
    targets = [value for e in page.elements for key, value in e.items() if key in ("href", "src", "xlink:href")]
    assert targets and all(value == "data:," or (value[0] == "#" and value[1:] in ids) for value in targets)
    assert "default-src 'none'" in next(e["content"] for e in page.all("meta") if e.get("http-equiv"))
    assert re.findall(r"url\((?!#)|@import", report) == []


def test_headings_descend_one_step_at_a_time_and_there_is_one_first(report):
    levels = [int(e["tag"][1]) for e in Page(report).elements if re.fullmatch("h[1-6]", e["tag"])]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_ids_are_unique_across_all_pictures(report):
    counts = Counter(element["id"] for element in Page(report).elements if element.get("id"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_pictures_are_named_and_described(report):
    page = Page(report)
    pictures = page.all("svg")
    assert len(pictures) == 4
    assert all(picture["role"] == "img" and picture["aria-label"] for picture in pictures)
    assert "1.00" not in pictures[0]["aria-label"] and "text: 0.17 margins" in page.all("desc")[0]["text"]


def test_tables_have_captions_and_scoped_headers_and_scroll_by_keyboard(report):
    page = Page(report)
    assert len(page.all("table")) == len(page.all("caption")) >= 4
    assert {header.get("scope") for header in page.all("th")} == {"col", "row"}
    regions = [element for element in page.all("div") if element.get("class") == "table"]
    assert all(region["tabindex"] == "0" and region["role"] == "region" for region in regions)
    assert len({region["aria-label"] for region in regions}) == len(regions)


def test_the_page_names_its_language_and_fits_a_phone(report):
    page = Page(report)
    assert page.all("html")[0]["lang"] == "en" and page.all("main") and page.all("nav")
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))


def luminance(color):
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(theme):
    style = (files("compress") / "templates" / "style.css").read_text()
    blocks = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{([^}]*)\}", style)]
    colors = blocks[theme]
    for ground in ("paper", "panel"):
        for name in ("ink", "muted", "accent", "bad", "good", "warn"):
            low, high = sorted((luminance(colors[name]), luminance(colors[ground])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, name)


@pytest.mark.parametrize("shift", [0.2, 0.028], ids=["fail", "inconclusive"])
def test_a_blocked_page_says_why_and_claims_nothing(make_run, shift):
    directory, gate = make_run(shift)
    page = Page((directory / "evidence" / "report.html").read_text())
    text = page.all("header")[0]["text"]
    assert gate["verdict"] in text and gate["reason"] in text and "confidence" not in text


def test_refused_evidence_without_numbers_is_shown():
    broken = [{"id": "d0", "hash": "h", "tokens": 0, "nll": math.nan}, {"id": "d1", "hash": "h"}]
    numbers = {name: None for name in ("baseline", "variant", "loss", "lower", "upper")}
    gate = GATE | {"verdict": "REFUSED", "reason": "r", "metrics": [METRIC | {**numbers, "verdict": "REFUSED"}]}
    page = Page(report_html(gate, RUN, PageInput({"docs": (broken, broken)})))
    assert "0 of 0 samples" in page.all("main")[0]["text"]
    assert "no valid evidence, REFUSED" in page.all("desc")[0]["text"]
    assert "two finished checkpoints were compared" in page.all("main")[0]["text"]


def tables_of(report):
    stage = {"name": "s", "summary": "s", "seconds": 1.0, "layers": [], "report": report}
    page = Page(report_html(GATE, RUN | {"stages": [stage]}, PageInput({})))
    return {t["text"].strip().splitlines()[0].partition(":")[0]: t["text"] for t in page.all("table")}, page


def test_layers_whose_output_changed_most_come_first():
    layers = {f"layers.{i}": {"error": i / 1000, "nearest": 0.5, "tokens": 9} for i in range(12)}
    blocks = [{"layers": layers}, {"layers": {"kept": {"because": "not in targets"}}}]
    tables, page = tables_of({"blocks": blocks, "bits": {"layers.4": 4.254}})
    worst = tables["Layers whose output changed most"]
    assert worst.split()[-4:] == ["layers.4", "4.25", "0.400%", "50.000%"]
    assert "1.100%" in worst and "kept" not in worst and "layers.3" not in worst
    assert "layers.3" in tables["Every layer of"]
    assert "error of the weights" not in page.all("main")[0]["text"]


def test_a_layer_that_calibration_does_not_reach_is_marked():
    layers = {"lm_head": {"error": 0.01, "nearest": 0.02, "tokens": 0}}
    tables, _ = tables_of({"blocks": [{"layers": layers}]})
    assert "lm_head (error of its weights: calibration does not reach it)" in tables["Layers whose output changed most"]
    assert "Every layer of" not in tables


def test_errors_of_weights_are_not_taken_for_errors_of_outputs():
    tables, page = tables_of({"bits": {"a": 8.02}, "weight_errors": {"a": 0.00071, "b": 0.002}})
    assert not any("output" in table for table in tables.values())
    assert tables["Layers whose weights moved most"].split()[-6:] == ["b", "–", "0.200%", "a", "8.02", "0.071%"]
    assert "and not of what the layers put out" in page.all("main")[0]["text"]


def test_a_stage_that_quantizes_nothing_has_no_errors():
    blocks = [{"name": "model.layers.0", "kept": {"model.layers.0.mlp.down_proj": 96}, "experts": []}]
    assert not any("Layers whose" in caption for caption in tables_of({"blocks": blocks})[0])


def test_earlier_attempts_are_counted_and_listed():
    earlier = [{"when": "2026-01-01", "plan": "ab", "verdict": "FAIL", "reason": "too much"}]
    page = Page(report_html(GATE, RUN, PageInput({}, attempts=earlier)))
    assert "This is attempt 2 of these bytes" in page.all("header")[0]["text"]
    assert [cell["text"] for cell in page.all("td") if cell.get("class") == "FAIL"] == ["FAIL"]


def test_samples_are_ordered_by_what_they_lost():
    found = views((rows(0.0), rows(0.01)))
    assert [round(view.loss, 9) for view in found] == [0.0, 0.01, 0.02]
    assert worst(found, 8) == [2, 1] and worst(found, 1) == [2]
    assert found[0].agreement == 0.9


def test_answers_lose_when_the_score_falls_and_show_both_sides():
    answers = [{"id": 7, "hash": "h", "score": score, "text": text} for score, text in ((1.0, "12"), (0.0, "13"))]
    found = views(([answers[0]], [answers[1]]))
    assert (found[0].loss, found[0].said, found[0].tokens) == (1.0, ("12", "13"), None)
    page = Page(report_html(GATE, RUN, PageInput({"gsm8k": ([answers[0]], [answers[1]])})))
    assert [quote["text"] for quote in page.all("blockquote")] == ["12", "13"]


def test_only_samples_of_both_sides_are_compared():
    assert [view.id for view in views((rows()[:1], rows()))] == ["d0"]


def test_a_loss_far_beyond_the_margin_is_drawn_at_the_edge():
    near = forest([Interval("a", 2.9, 2.8, 2.9, "FAIL")])
    assert len(forest([Interval("a", 1e6, 1e5, 1e7, "FAIL")])) < 2 * len(near)


def test_pictures_keep_to_the_colours_of_the_page():
    text = scatter([1.0, 2.0], [1.1, 2.2], [1], name="docs")
    assert re.findall(r"#[0-9a-f]{6}", text) == [] and "var(--accent)" in text


def test_equal_input_gives_equal_bytes():
    assert scatter([1.0, 2.0], [1.1, 2.2], [1], name="a") == scatter([1.0, 2.0], [1.1, 2.2], [1], name="a")
