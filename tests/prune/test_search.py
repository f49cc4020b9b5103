"""The split between axes: which ones are tried, that the best is made, and that nothing is measured twice."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.recipe import Stage
from compress.stage_report import stage_sections
from compress.stages import Place, plan_stages
from prune.target import Candidate, Target, splits

CALIBRATION = {"documents": "python-docs", "problems": None, "samples": 8, "length": 64}
SEARCH = {"candidates": 3, "samples": 8, "held_out": 2}
# half of the tiny model: 192 of 256 channels of both layers, or one layer
HALF = {"target": {"params": "-47.3%"}, "axes": ["ffn", "layers"], "calibration": CALIBRATION, "search": SEARCH}


def plan(source, folder, **options):
    stage = Stage.model_validate({"prune": {**HALF, **options}})
    (found,) = plan_stages([stage], Checkpoint.open(source), Place(folder, 10**9))
    return found


@pytest.fixture
def source(model_of):
    """A model whose second layer does nothing."""
    path = model_of("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("most", "layers"), [(2, [10, 4]), (3, [10, 7, 4]), (9, [10, 9, 8, 7, 6, 5, 4])], ids=["ends", "middle", "all"]
)
def test_splits_are_spread_evenly(most, layers):
    dims = [{"ffn": ffn, "layers": layers} for layers in range(4, 11) for ffn in (60, 50)]
    source = Candidate({"ffn": 100, "layers": 10}, 1000, 0)
    candidates = [source, *(Candidate(each, 505 - each["ffn"] // 10, 0) for each in dims)]
    found = splits(candidates, Target("params", -0.5, True, 0.01), ["ffn", "layers"], most)
    assert [c.dims["layers"] for c in found] == layers and {c.dims["ffn"] for c in found} == {50}


def test_the_split_that_loses_least_is_made(source, tmp_path):
    found = plan(source, tmp_path)
    assert [(row[""], row["ffn"], row["layers"]) for row in found.candidates[:3]] == [
        ("source", "256", "2"),
        ("tried", "64", "2"),
        ("tried", "256", "1"),
    ]
    options, rows = found.decide(torch.device("cpu"), lambda _: None)
    assert options.target == {"num_hidden_layers": 1} and options.search is None
    assert [row["layers"] for row in rows] == [1, 2] and abs(rows[0]["kl"]) < 1e-6 < rows[1]["kl"]
    assert [path.suffix for path in (tmp_path / "0-prune.search").glob("*")] == [""]  # no checkpoint is left


def test_a_search_that_was_killed_measures_only_what_is_missing(source, tmp_path, monkeypatch):
    import prune.search as search

    pruned, original = [], search.run_prune

    def once(plan, *args):
        if len(pruned) == 1:
            raise KeyboardInterrupt
        pruned.append(plan.after["layers"])
        return original(plan, *args)

    monkeypatch.setattr(search, "run_prune", once)
    with pytest.raises(KeyboardInterrupt):
        plan(source, tmp_path).decide(torch.device("cpu"), lambda _: None)
    monkeypatch.setattr(search, "run_prune", lambda plan, *args: pruned.append("again") or original(plan, *args))
    _, rows = plan(source, tmp_path).decide(torch.device("cpu"), lambda _: None)
    assert pruned == [1, "again"] and len(rows) == 2
    _, again = plan(source, tmp_path).decide(torch.device("cpu"), lambda _: None)
    assert pruned == [1, "again"] and again == rows


@pytest.mark.parametrize(
    "options",
    [{"search": None}, {"axes": ["ffn"]}, {"target": {"num_hidden_layers": 1}}],
    ids=["not wanted", "one axis", "dims"],
)
def test_nothing_is_searched_where_there_is_no_choice(source, tmp_path, options):
    found = plan(source, tmp_path, **options)
    assert found.decide is None and found.candidates[1][""] == "chosen"


def test_a_run_makes_what_it_found(source, tmp_path):
    recipe = {
        "model": str(source),
        "output": "out",
        "device": "cpu",
        "stages": [{"prune": HALF}, {"quantize": {"format": "fp8"}}],
        "evals": {"documents": {"text": {"source": "python-docs", "count": 20, "max_tokens": 24}}},
        "gate": {"aa_samples": 2, "metrics": {"text": {"kind": "log_perplexity", "max_increase": "50%"}}},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "compress", "run", "recipe=recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "num_hidden_layers 1: KL 0.0000" in done.stderr and "intermediate_size 64: KL" in done.stderr
    assert Checkpoint.open(tmp_path / "out").config["num_hidden_layers"] == 1
    run = json.loads((tmp_path / "out/evidence/run.json").read_text())
    assert [row["layers"] for row in run["stages"][0]["search"]] == [1, 2]
    assert [section.title for section in stage_sections(run)] == ["Split: prune layers (kl)"]
