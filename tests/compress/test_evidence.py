"""What a run leaves: every file, how it reads back, and that equal runs leave equal bytes."""

import hashlib
import json
import math
import subprocess
import sys

import pytest
import yaml

from compress.environment import environment
from compress.errors import InputError, Refused
from compress.evidence import write_evidence
from compress.evidence_files import Plan, read_gate, read_lock, read_rows, samples_file, seal
from evals.gate import Metric, decide

FILES = [
    "SHA256SUMS",
    "attempts.jsonl",
    "baseline.manifest.json",
    "environment.json",
    "gate.json",
    "junit.xml",
    "manifest.json",
    "recipe.lock.yaml",
    "report.html",
    "report.md",
    "run.json",
    "samples/docs.baseline.jsonl",
    "samples/docs.variant.jsonl",
    "samples/gsm8k%2Fmain.baseline.jsonl",
    "samples/gsm8k%2Fmain.variant.jsonl",
    "samples/sums.baseline.jsonl",
    "samples/sums.variant.jsonl",
    "test-result.intoto.json",
]
AFTERWARDS = {"SHA256SUMS", "test-result.intoto.json"}


def files_of(directory):
    folder = directory / "evidence"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_file_is_there_and_the_gate_reads_back(make_run):
    directory, gate = make_run()
    assert sorted(files_of(directory)) == FILES
    assert read_gate(directory) == gate


def test_gate_json_says_what_was_decided(make_run):
    _, gate = make_run()
    assert (gate["verdict"], gate["exit_code"], gate["alpha"], gate["schema_version"]) == ("PASS", 0, 0.05, 1)
    by_id = {metric["id"]: metric for metric in gate["metrics"]}
    assert list(by_id) == ["text", "math", "kl", "task"]
    fields = {"id", "kind", "data", "required", "n", "baseline", "variant", "loss", "lower", "upper", "margin",
              "verdict", "reason", "look", "alpha_spent", "needed_n", "extra"}  # fmt: skip
    assert all(metric.keys() == fields for metric in by_id.values())
    assert by_id["text"]["extra"]["aa_difference"] == 0.0005 and by_id["task"]["extra"]["b"] == 2


def test_the_verdict_is_computed_where_it_is_written(make_run):
    _, gate = make_run(shift=0.2)
    assert (gate["verdict"], gate["exit_code"]) == ("FAIL", 3)


def test_reasons_beside_the_rows_refuse(make_run):
    _, gate = make_run(refusals=["the tokenizers differ"])
    assert (gate["verdict"], gate["exit_code"], gate["reason"]) == ("REFUSED", 5, "the tokenizers differ")


def test_rows_read_back_in_order(make_run):
    directory, _ = make_run()
    rows = read_rows(directory, "gsm8k/main", "variant")
    assert len(rows) == 120 and rows[7] == {"id": 7, "hash": "h7", "score": 0.0}


def test_sums_are_those_of_sha256sum(make_run):
    directory, gate = make_run()
    files = files_of(directory)
    listed = dict(reversed(line.split("  ")) for line in files["SHA256SUMS"].decode().splitlines())
    assert listed == {name: hashlib.sha256(files[name]).hexdigest() for name in FILES if name not in AFTERWARDS}
    assert gate["binds"]["files"].items() <= listed.items()
    assert seal(directory) == hashlib.sha256(files["SHA256SUMS"]).hexdigest()


def test_what_json_cannot_say_is_null_and_refuses_again(make_run):
    rows = [{"id": f"d{i}", "hash": "h", "tokens": 9, "nll": 20.0} for i in range(30)]
    broken = [{**row, "nll": math.nan} for row in rows]
    metric = Metric(id="text", kind="log_perplexity", data="docs", margin=0.03)
    result = decide(metric, rows, broken, alpha=0.05, aa_difference=math.nan)
    directory, gate = make_run(plan=Plan(0.05, (metric,)), results=[result], rows={"docs": (rows, broken)})
    assert gate["metrics"][0]["extra"]["aa_difference"] is None
    stored = read_rows(directory, "docs", "variant")
    assert stored[0]["nll"] is None
    assert decide(metric, rows, stored, alpha=0.05).reason == result.reason
    assert b"NaN" not in b"".join(files_of(directory).values())


def test_the_lock_holds_the_plan_and_the_recipe(make_run):
    directory, gate = make_run()
    lock = yaml.safe_load((directory / "evidence" / "recipe.lock.yaml").read_text())
    assert lock["recipe"] == {"model": "demo", "gate": {"alpha": 0.05}}
    plan, recipe = read_lock(directory)
    assert recipe == lock["recipe"]
    assert plan.record() == lock["plan"] and plan.digest == gate["binds"]["plan"]
    assert [metric.margin for metric in plan.metrics] == [0.03, 0.05, 0.2, 0.08]
    assert plan.metrics[3].looks == (60, 120)


def test_a_plan_differs_when_a_margin_or_the_data_does():
    metric = Metric(id="m", kind="gold_nll", data="d", margin=0.05)
    plans = [
        Plan(0.05, (metric,)),
        Plan(0.01, (metric,)),
        Plan(0.05, (metric,), {"d": {"sha256": "0"}}),
        Plan(0.05, (Metric(id="m", kind="gold_nll", data="d", margin=0.06),)),
    ]
    assert len({plan.digest for plan in plans}) == 4
    assert Plan.from_record(plans[2].record()) == plans[2]


def test_evidence_is_written_once(make_run):
    directory, _ = make_run()
    with pytest.raises(InputError) as error:
        write_evidence(directory, None)
    assert str(error.value) == f"{directory}/evidence exists already; evidence is written once"


@pytest.mark.parametrize(
    ("data", "name"),
    [("text", "samples/text.variant.jsonl"), ("../x y", "samples/..%2Fx%20y.variant.jsonl")],
)
def test_any_name_of_data_is_a_safe_file_name(data, name):
    assert samples_file(data, "variant") == name


def test_a_directory_without_evidence_is_an_input_error(tmp_path):
    with pytest.raises(InputError) as error:
        read_gate(tmp_path)
    assert str(error.value) == f"{tmp_path} holds no evidence/gate.json; give the directory that a run has written"


@pytest.mark.parametrize("text", ["3\n", '{"nll": 2}\n'], ids=["number", "no id"])
def test_rows_that_are_none_are_refused(make_run, text):
    directory, _ = make_run()
    (directory / "evidence" / "samples" / "docs.variant.jsonl").write_text(text)
    with pytest.raises(Refused, match=r"^samples/docs\.variant\.jsonl holds a line that is no row with an id$"):
        read_rows(directory, "docs", "variant")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "gate.json cannot be read: "),
        ("[]", "gate.json holds no JSON object"),
        ("{}", "gate.json has schema version None, this program reads 1"),
        ('{"schema_version": 1, "verdict": 3}', "gate.json has no verdict of type str"),
    ],
    ids=["cut", "list", "empty", "shape"],
)
def test_a_gate_json_of_something_else_is_refused(tmp_path, text, sentence):
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "gate.json").write_text(text)
    with pytest.raises(Refused) as error:
        read_gate(tmp_path)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    "text",
    ["plan: {alpha: 0.05, metrics: [{id: m, kind: ppl, data: d, margin: 1, looks: []}], data: {}}", "[1]", "{", "x: 1"],
)
def test_a_lock_without_a_plan_to_judge_by_is_refused(tmp_path, text):
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "recipe.lock.yaml").write_text(text)
    with pytest.raises(Refused, match=r"recipe\.lock\.yaml (holds no plan to judge by|cannot be read): "):
        read_lock(tmp_path)


def test_the_environment_names_versions_and_no_person_host_or_path():
    found = environment()
    assert found["packages"]["torch"] and found["python"] == sys.version.split()[0]
    text = json.dumps(found)
    host = subprocess.run(["uname", "-n"], capture_output=True, text=True, check=True).stdout.strip()
    assert host not in text and "/" not in text.replace("/proc", "")
