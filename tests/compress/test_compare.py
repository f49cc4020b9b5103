"""Several variants of one source: the table, the picture, and what may not be compared."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from compress.compare import compare, comparison_html, show
from compress.errors import InputError
from compress.manifest import Manifest
from compress.pictures import Point, pareto


@pytest.fixture
def variants(make_run, tmp_path):
    """Three runs: one that passed, a smaller one that failed, and one whose bytes were changed afterwards."""
    made = {}
    for name, shift in (("good", 0.005), ("small", 0.2), ("changed", 0.005)):
        directory, _ = make_run(shift)
        made[name] = directory.rename(tmp_path / name)
    run = json.loads((made["small"] / "evidence" / "run.json").read_text())
    assert run["bytes_after"] == 134_500_000
    (made["changed"] / "config.json").write_text("{ }")
    return made


def test_each_is_verified_and_measured_in_margins(variants):
    found = {variant.name.rpartition("/")[2]: variant for variant in compare(list(variants.values()))}
    assert {name: variant.verdict for name, variant in found.items()} == {
        "good": "PASS",
        "small": "FAIL",
        "changed": "REFUSED",
    }
    assert 0 < found["good"].worst < 1 < found["small"].worst


def test_the_page_shows_all_of_them(variants):
    text = comparison_html(compare(list(variants.values())))
    assert "1 of 3 passed" in text and text.count("<tr>") == 4
    assert '<td class="PASS">PASS</td>' in text and '<td class="REFUSED">REFUSED</td>' in text
    assert text.count("<svg") == 1 and "choosing is a selection too" in text
    assert "not judged by the same plan" not in text


def test_another_plan_is_said(variants):
    first, second, *_ = compare(list(variants.values()))
    gate = second.gate | {"binds": second.gate["binds"] | {"plan": "other"}}
    assert "not judged by the same plan" in comparison_html([first, type(second)(**{**vars(second), "gate": gate})])


def test_the_command_prints_a_table_and_writes_the_page(variants, tmp_path, capsys):
    page = tmp_path / "compare.html"
    assert show([variants["good"], variants["small"]], page, as_json=False) == 0
    output = capsys.readouterr().out
    assert "PASS" in output and "FAIL" in output and output.rstrip().endswith("compare.html")
    assert page.read_text().startswith("<!doctype html>")
    assert show([variants["good"], variants["small"]], page, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)["variants"]
    assert [variant["verdict"] for variant in found] == ["PASS", "FAIL"] and found[0]["bytes_after"] == 134_500_000


def test_one_is_not_enough(variants):
    with pytest.raises(InputError, match=r"give at least two outputs of runs to compare \(got 1\)"):
        compare([variants["good"]])


def test_variants_of_different_sources_do_not_compare(variants, write_run, tmp_path):
    write_run(tmp_path / "other", 0.005, baseline=Manifest(()))
    with pytest.raises(InputError, match="variants of different sources"):
        compare([variants["good"], tmp_path / "other"])


def test_refused_evidence_without_numbers_has_no_dot(write_run, variants, tmp_path):
    write_run(tmp_path / "refused", 0.005, results=[])
    found = compare([variants["good"], tmp_path / "refused"])
    assert sorted(str(variant.worst is None) for variant in found) == ["False", "True"]
    assert comparison_html(found).count("<tr>") == 3


def test_dots_bear_the_last_part_of_a_name_where_that_tells_them_apart(variants):
    good, bad = compare([variants["good"], variants["small"]])
    apart = [replace(good, name="out/fp8"), replace(bad, name="out/int4.blocked")]
    alike = [replace(good, name="a/fp8"), replace(bad, name="b/fp8.blocked")]
    named = [re.findall(r">((?:\w+/)?(?:fp8|int4)(?:\.blocked)?)</text>", comparison_html(v)) for v in (apart, alike)]
    assert [sorted(names) for names in named] == [["fp8", "int4"], ["a/fp8", "b/fp8.blocked"]]


def test_only_variants_that_nothing_beats_are_joined():
    points = [Point("a", 100, 0.5, "PASS"), Point("b", 50, 0.9, "PASS"), Point("c", 120, 0.6, "PASS")]
    text = pareto(points)
    path = next(part for part in text.split("<path ")[1:] if "stroke-width: 1.5; stroke-linecap: square" in part)
    assert path.split('"')[1].count("L") == 1


def test_names_of_dots_that_nearly_touch_stand_apart_in_the_order_of_the_dots():
    points = [Point(name, 113_000_000 + i, 9 - i / 10, "FAIL") for i, name in enumerate(("top", "middle", "low"))]
    text = pareto([*points, Point("far", 269_000_000, 0.0, "PASS")])
    tops = [float(re.search(rf'y="([-\d.]+)"[^>]*>{name}<', text)[1]) for name in ("top", "middle", "low")]
    assert all(10 < below - above < 30 for above, below in pairwise(tops))
