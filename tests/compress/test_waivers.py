"""A waived loss is WAIVED and nothing better: for one metric, these bytes, until a day, by a person."""

import json
import re
from datetime import date, timedelta

import pytest
from pydantic import ValidationError

from compress.verify import show, verify
from compress.waivers import Waiver, exit_code, waive
from evals.gate import Metric, MetricResult, Outcome
from evals.options import Gate

TODAY = date(2026, 6, 1)
BYTES = "ab" * 32
WAIVER = Waiver("text", BYTES, "known", "Ada", "2026-06-01")
METRICS = tuple(Metric(id=name, kind="gold_nll", data="d", margin=0.05) for name in ("text", "math"))


def result(name, verdict, required=True):
    return MetricResult(name, "gold_nll", "d", required, 0.05, 40, verdict, "why")


def decided(*results, waivers=(WAIVER,), verdict="FAIL", checkpoint=BYTES, today=TODAY):
    outcome = Outcome(verdict, 3, "why")
    return waive(outcome, results, waivers, metrics=METRICS, checkpoint=checkpoint, today=today)


def test_a_waiver_covers_the_metric_that_blocks():
    outcome, applied = decided(result("text", "FAIL"), result("math", "PASS"))
    assert (outcome.verdict, outcome.exit_code, outcome.reason) == ("WAIVED", 3, "why")
    assert applied == (WAIVER,)


@pytest.mark.parametrize(
    ("results", "change"),
    [
        ((result("text", "FAIL"), result("math", "FAIL")), {}),
        ((result("text", "FAIL"),), {}),
        ((result("text", "FAIL"), result("math", "PASS")), {"today": TODAY + timedelta(days=1)}),
        ((result("text", "FAIL"), result("math", "PASS")), {"checkpoint": "cd" * 32}),
        ((result("text", "REFUSED"), result("math", "FAIL")), {"verdict": "REFUSED"}),
        ((result("text", "PASS"), result("math", "PASS")), {"verdict": "PASS"}),
    ],
    ids=["another metric blocks", "a metric was not measured", "it has ended", "other bytes", "refused", "passed"],
)
def test_a_waiver_covers_nothing_else(results, change):
    verdict = change.get("verdict", "FAIL")
    assert decided(*results, **change) == (Outcome(verdict, 3, "why"), ())


def test_metrics_that_are_not_required_need_no_waiver():
    outcome, _ = decided(result("text", "INCONCLUSIVE"), result("math", "PASS"), result("kl", "FAIL", required=False))
    assert outcome.verdict == "WAIVED"


@pytest.mark.parametrize(
    ("verdict", "until", "accept", "code"),
    [
        ("WAIVED", "9999-01-01", True, 0),
        ("WAIVED", "9999-01-01", False, 3),
        ("WAIVED", "2020-01-01", True, 3),
        ("FAIL", "9999-01-01", True, 3),
    ],
    ids=["accepted", "not accepted", "ended", "not waived"],
)
def test_only_an_accepted_waiver_that_has_not_ended_exits_with_zero(verdict, until, accept, code):
    gate = {"verdict": verdict, "exit_code": 3, "waivers": [{"metric": "text", "until": until}]}
    assert exit_code(gate, accept_waivers=accept) == code


def option(**fields):
    return {"metric": "text", "checkpoint_sha256": BYTES, "reason": "r", "by": "Ada", "until": "2026-06-01"} | fields


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"metric": "tex"}, "waivers for tex, which gate.metrics does not name"),
        ({"checkpoint_sha256": "ab"}, "should match pattern"),
        ({"by": ""}, "at least 1 character"),
        ({"reason": ""}, "at least 1 character"),
        ({"until": "soon"}, "valid date"),
    ],
    ids=["metric", "bytes", "person", "reason", "day"],
)
def test_a_recipe_names_all_of_it(fields, sentence):
    metrics = {"text": {"kind": "log_perplexity", "max_increase": "3%"}}
    assert Gate.model_validate({"metrics": metrics, "waivers": [option()]}).waivers[0].until == TODAY
    with pytest.raises(ValidationError, match=sentence):
        Gate.model_validate({"metrics": metrics, "waivers": [option(**fields)]})


@pytest.fixture
def waived_run(make_run, tmp_path):
    """A run whose every blocking metric is waived until `until`."""

    def make(until="9999-01-01"):
        _, gate = make_run(0.2)
        (tmp_path / "run").rename(tmp_path / "first")
        names = [metric["id"] for metric in gate["metrics"] if metric["verdict"] != "PASS"]
        found = {"checkpoint_sha256": gate["binds"]["variant_manifest"], "until": until}
        waivers = [option(metric=name, **found) for name in names]
        return make_run(0.2, recipe={"model": "demo", "gate": {"alpha": 0.05, "waivers": waivers}})

    return make


def test_evidence_says_who_waived_what_and_verifies(waived_run):
    directory, gate = waived_run()
    assert (gate["verdict"], gate["exit_code"], gate["decided_on"]) == ("WAIVED", 3, date.today().isoformat())
    assert {waiver["by"] for waiver in gate["waivers"]} == {"Ada"} and len(gate["waivers"]) >= 2
    report = verify(directory)
    assert (report.problems, report.verdict, report.exit_code) == ((), "WAIVED", 3)
    page = (directory / "evidence" / "report.html").read_text()
    text = (directory / "evidence" / "report.md").read_text()
    assert "<h1>WAIVED</h1>" in page and "was waived by Ada until 9999-01-01: r" in page
    assert text.startswith("# WAIVED\n") and "With 95% confidence" not in text + page
    assert "waived by Ada until 9999-01-01: r" in text
    assert '<failure type="FAIL"' in (directory / "evidence" / "junit.xml").read_text()


def test_verify_exits_with_zero_only_where_waivers_are_accepted(waived_run, capsys):
    directory, _ = waived_run()
    assert show(directory, accept_waivers=True) == 0
    assert show(directory) == 3
    assert show(directory, accept_waivers=True, as_json=True) == 0
    assert capsys.readouterr().out.count("WAIVED") == 3


def test_an_ended_waiver_waives_nothing(waived_run):
    _, gate = waived_run("2020-01-01")
    assert (gate["verdict"], gate["waivers"]) == ("FAIL", [])


def edit(directory, change):
    path = directory / "evidence" / "gate.json"
    gate = json.loads(path.read_text())
    change(gate)
    path.write_text(json.dumps(gate))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda g: g.update(waivers=[]), "gate.json says of the whole: waivers .*; the stored rows .*"),
        (lambda g: g["waivers"][0].update(by="Eve"), "gate.json says of the whole: waivers .*Eve.*; .*Ada.*"),
        (lambda g: g.pop("decided_on"), "gate.json says of the whole: verdict WAIVED; .* give verdict FAIL"),
    ],
    ids=["dropped", "another person", "no day"],
)
def test_edited_waivers_are_noticed(waived_run, change, sentence):
    directory, _ = waived_run()
    edit(directory, change)
    problems = verify(directory).problems
    assert any(re.fullmatch(sentence, problem) for problem in problems), problems


def test_a_forged_waiver_is_noticed(make_run):
    directory, _ = make_run(0.2)
    forged = option(metric="text", checkpoint_sha256=BYTES, until="9999-01-01")
    edit(directory, lambda g: g.update(verdict="WAIVED", waivers=[forged], decided_on="2026-06-01"))
    assert any("verdict WAIVED; " in problem for problem in verify(directory).problems)
