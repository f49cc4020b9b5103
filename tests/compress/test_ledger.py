"""The ledger: one question is asked once, and every other one about the same bytes is counted."""

import json
import shutil

import pytest

from compress.evaluation import read_measured
from compress.evidence_files import Plan
from compress.ledger import Kept, Question, attempts, recall, remember
from evals.gate import Metric

GATE = {"verdict": "FAIL", "reason": "the loss is at least 9%"}


def question(margin=0.03, data="aa", **fields):
    metric = Metric(id="text", kind="log_perplexity", data="docs", margin=margin)
    plan = Plan(0.05, (metric,), {"docs": {"sha256": data}})
    return Question(**{"checkpoint": "c0", "source": "50", "plan": plan, "scoring": {"dtype": "float32"}} | fields)


@pytest.fixture
def kept(tmp_path):
    """What two workers have left, with hidden states that need not be kept."""
    sides = []
    for side, nll in (("source", 200.0), ("variant", 201.0)):
        folder = tmp_path / side
        folder.mkdir()
        (folder / "docs.jsonl").write_text(json.dumps({"id": "d0", "tokens": 100, "nll": nll}) + "\n")
        (folder / "docs.states.safetensors").write_bytes(b"large")
        result = {"aa": {"docs": 0.0}, "tokenizer": {}, "peak_bytes": 9, "seconds": 1.5}
        (folder / "result.json").write_text(json.dumps(result))
        sides.append(read_measured(folder))
    return Kept(*sides, {"torch": "2.13"})


def test_the_same_question_gives_the_same_scores(kept, cache):
    assert recall(question()) is None
    remember(question(), kept, GATE)
    found = recall(question())
    assert found.variant.rows == kept.variant.rows and found.source.rows == kept.source.rows
    assert (found.environment, found.variant.peak_bytes) == ({"torch": "2.13"}, 9)
    assert not list(cache.rglob("*.safetensors")) and not list(cache.rglob(".attempt.*"))


@pytest.mark.parametrize(
    "other",
    [
        question(margin=0.05),
        question(data="bb"),
        question(source="51"),
        question(scoring={"dtype": "bfloat16"}),
        question(checkpoint="c1"),
    ],
    ids=["margin", "data", "source", "engine", "bytes"],
)
def test_another_question_is_measured(kept, other):
    remember(question(), kept, GATE)
    assert recall(other) is None


def test_other_questions_about_the_same_bytes_are_counted_in_order(kept):
    remember(question(), kept, GATE)
    remember(question(margin=0.05), kept, GATE | {"verdict": "PASS"})
    found = attempts(question(data="bb"))
    assert [(attempt["verdict"], attempt["margins"]) for attempt in found] == [
        ("FAIL", {"text": 0.03}),
        ("PASS", {"text": 0.05}),
    ]
    assert found[0]["data"] == {"docs": "aa"} and found[0]["reason"] == GATE["reason"]
    assert [attempt["verdict"] for attempt in attempts(question())] == ["PASS"]
    assert attempts(question(checkpoint="c1")) == []


def test_a_question_is_written_down_once(kept):
    for _ in range(2):
        remember(question(), kept, GATE)
    assert len(attempts(question(margin=0.5))) == 1


def test_damaged_scores_are_measured_again(kept, cache):
    remember(question(), kept, GATE)
    rows = next(cache.rglob("variant/docs.jsonl"))
    rows.write_text(rows.read_text().replace("201", "200"))
    assert recall(question()) is None
    next(cache.rglob("sealed.json")).write_text("{")
    assert recall(question()) is None


def test_deleting_the_output_does_not_help(kept, tmp_path):
    remember(question(), kept, GATE)
    for side in ("source", "variant"):
        shutil.rmtree(tmp_path / side)
    assert recall(question()).variant.rows == kept.variant.rows
