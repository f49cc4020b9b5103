"""What a score depends on, and when to stop scoring."""

import json
from pathlib import Path

import pytest

from compress.evaluation import scoring
from compress.recipe_file import load_recipe
from compress.worker import _until
from evals.gate import Metric, decide

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
"""


@pytest.mark.parametrize("changed", ["items.jsonl", "sums.yaml"])
def test_the_content_of_a_task_is_part_of_what_a_score_depends_on(changed: str, tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(TASK)
    (tmp_path / "items.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    metric = "gate.metrics.sums={kind: accuracy, max_loss_pp: 2}"
    recipe = load_recipe("fp8", ["model=demo", f"evals.tasks.sums={{source: {tmp_path / 'sums.yaml'}}}", metric])
    before = scoring(recipe, [])
    assert scoring(recipe, []) == before
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    assert scoring(recipe, []) != before


def rows(count: int, shift: float = 0.0) -> list[dict[str, object]]:
    """Samples whose loss per token is 2 nats and a shift, a little more in every other one."""
    return [{"id": i, "hash": "h", "tokens": 100, "nll": 200 + 100 * shift + i % 2} for i in range(count)]


def test_scoring_goes_on_until_the_gate_can_decide_with_what_two_runs_of_the_source_differ_by() -> None:
    metric = Metric(id="m", kind="gold_nll", data="d", margin=0.05, looks=(30, 60))
    base, variant = rows(60), rows(60, 0.03)
    assert _until([metric], base, variant[:30], alpha=0.05, aa_difference=None) == 0
    until = _until([metric], base, variant[:30], alpha=0.05, aa_difference=0.04)
    assert until == 60
    assert decide(metric, base, variant[:until], alpha=0.05, aa_difference=0.04).verdict == "INCONCLUSIVE"
