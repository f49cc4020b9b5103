"""GitHub's step summary, MLflow, and the files of the pipelines."""

import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path

import mlflow
import pytest
import yaml
from typer.main import get_command

from compress.cli import app
from compress.errors import InputError
from compress.evidence_files import read_json, seal
from compress.outlets import LIMIT, check_outlets, show_elsewhere
from compress.push_options import parse_push
from compress.recipe_file import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_outlets(monkeypatch):
    for name in ("GITHUB_STEP_SUMMARY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shown(make_run):
    """Show a run wherever the environment asks for it."""

    def act(shift=0.005):
        directory, gate = make_run(shift)
        show_elsewhere(directory, gate, read_json(directory / "evidence" / "run.json"))
        return directory, gate

    return act


def test_the_report_is_added_to_the_step_summary(shown, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("# Before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    directory, _ = shown()
    report = (directory / "evidence" / "report.md").read_text()
    assert summary.read_text() == f"# Before\n{report}\n"


def test_a_report_that_does_not_fit_is_a_line(shown, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * (LIMIT - 100))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    shown(0.2)
    assert summary.read_text().endswith("x# FAIL\n\nThe report is too long for here.\n")


def test_nothing_is_shown_where_nobody_asks(shown, tmp_path):
    shown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.fixture
def tracking(tmp_path, monkeypatch):
    """A local sqlite store."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(None)
    return mlflow.MlflowClient(uri)


def test_a_run_is_tracked_with_bounds_hashes_and_evidence(shown, tracking):
    directory, gate = shown()
    [run] = tracking.search_runs([tracking.get_experiment_by_name("Default").experiment_id])
    text = gate["metrics"][0]
    assert run.data.metrics["text/upper"] == pytest.approx(text["upper"])
    assert run.data.metrics["bytes_after"] == 134_500_000 and run.data.metrics["task/n"] == 120
    assert run.data.metrics["text/perplexity_baseline"] == pytest.approx(math.exp(text["baseline"]))
    assert run.data.params["stages"] == "quantize to int8 (rtn)" and run.data.tags["verdict/text"] == "PASS"
    assert run.data.tags["verdict"] == "PASS" and run.data.tags["seal"] == seal(directory)
    assert run.data.tags["variant_manifest"] == gate["binds"]["variant_manifest"]
    assert run.data.params["command"] == "compress run recipe=int8.yaml"
    kept = {artifact.path for artifact in tracking.list_artifacts(run.info.run_id, "evidence")}
    assert {"evidence/gate.json", "evidence/report.html", "evidence/samples"} <= kept


def test_what_mlflow_prints_is_kept_off_standard_output(shown, tracking, monkeypatch, capsys):
    """With a tracking server it prints the addresses of run and experiment there."""
    monkeypatch.setattr(mlflow, "set_tags", lambda _: print("View run"))
    shown()
    captured = capsys.readouterr()
    assert captured.out == "" and "View run" in captured.err


def test_a_store_that_fails_is_said_and_changes_nothing(shown, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'file'}")
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(None)
    shown()
    assert "MLflow did not take the run" in capsys.readouterr().err


def test_tracking_without_mlflow_is_refused_before_the_work(monkeypatch):
    check_outlets()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    check_outlets()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^MLFLOW_TRACKING_URI is set and mlflow is missing: pip install "):
        check_outlets()


def step(tmp_path, *, prints, code, **environment):
    """Run the pipelines' step with a stand-in for the program; its words, the outputs and what was printed."""
    program = tmp_path / "compress"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >words\nprintf "%s" \'{prints}\'\nexit {code}\n')
    program.chmod(0o755)
    settings = {"COMPRESS": str(program), "GITHUB_OUTPUT": str(tmp_path / "outputs"), "GITHUB_ACTIONS": "true"}
    command = ["bash", str(ROOT / "examples" / "run_step.sh")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | settings | environment, capture_output=True, text=True
    )
    outputs = tmp_path / "outputs"
    return done, (tmp_path / "words").read_text().splitlines(), outputs.read_text() if outputs.exists() else ""


RESULT = json.dumps({"output": "/w/out/fp8.blocked", "gate": {"verdict": "FAIL"}})


def test_the_step_ends_as_the_gate_ends_and_says_where_to_look(tmp_path):
    done, words, outputs = step(tmp_path, prints=RESULT, code=3, RECIPE="fp8.yaml", OPTIONS="model=a b\n\ndevice=cpu")
    assert done.returncode == 3, done.stderr
    assert words == ["run", "recipe=fp8.yaml", "model=a b", "device=cpu", "--json"]
    assert outputs == "output=/w/out/fp8.blocked\nverdict=FAIL\n"
    assert done.stdout == (
        "::error title=compress::FAIL, see the step summary and /w/out/fp8.blocked/evidence/report.html\n"
    )


def test_the_step_of_a_pass_is_silent(tmp_path):
    passed = json.dumps({"output": "out", "gate": {"verdict": "PASS"}})
    done, words, outputs = step(tmp_path, prints=passed, code=0, RECIPE="fp8.yaml", ACCEPT="true")
    assert (done.returncode, done.stdout, words[-2:]) == (0, "", ["--accept-waivers", "--json"])
    assert outputs == "output=out\nverdict=PASS\n"


def test_the_step_of_an_error_has_no_outputs(tmp_path):
    done, _, outputs = step(tmp_path, prints="", code=2, RECIPE="fp8.yaml")
    assert (done.returncode, outputs) == (2, "")
    assert done.stdout == "::error title=compress::no variant was judged, exit code 2\n"


def test_options_cannot_become_commands(tmp_path):
    hostile = "model=$(touch hacked); touch hacked #`touch hacked`"
    _, words, _ = step(tmp_path, prints=RESULT, code=3, RECIPE='"; touch hacked; "', OPTIONS=hostile)
    assert words[1:3] == ['recipe="; touch hacked; "', hostile] and not (tmp_path / "hacked").exists()


def test_the_action_passes_inputs_through_the_environment_only():
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert not any("${{" in step.get("run", "") for step in steps)
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(action["inputs"])
    assert all(step["shell"] == "bash" for step in steps if "run" in step)


@pytest.mark.parametrize("name", ["github.yml", "gitlab-ci.yml"])
def test_the_examples_are_yaml_and_name_files_that_a_run_writes(name, make_run):
    text = (ROOT / "examples" / name).read_text()
    assert yaml.safe_load(text)
    directory, _ = make_run()
    for path in re.findall(r"evidence/([\w.]+)", text):
        assert (directory / "evidence" / path).exists()


COMMANDS = [
    (file.name, command)
    for file in (ROOT / "docs" / "release.md", ROOT / "Containerfile", *sorted((ROOT / "examples").iterdir()))
    for command in re.findall(
        r"^[^`\n]*?\bcompress(?:-gate)? ((?:run|verify|sign|push|compare) [^'\n]+)", file.read_text(), re.M
    )
]


@pytest.mark.parametrize(("file", "command"), COMMANDS, ids=[f"{file}-{i}" for i, (file, _) in enumerate(COMMANDS)])
def test_commands_that_are_shown_are_understood(file, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, *words = shlex.split(command)
    found = get_command(app).commands[name].make_context(name, words).params
    if name == "run":
        recipe = next(word for word in found["words"] if word.startswith("recipe="))
        load_recipe(recipe.removeprefix("recipe="), [word for word in found["words"] if word != recipe])
    if name == "push":
        parse_push(found["words"])


def test_every_pipeline_shows_a_command():
    assert {"release.md", "Containerfile", "gitlab-ci.yml", "Jenkinsfile"} <= {file for file, _ in COMMANDS}


def test_a_pipeline_runs_its_steps_with_a_shell():
    """The image starts compress, so a runner that wants a shell must say so."""
    assert yaml.safe_load((ROOT / "examples/gitlab-ci.yml").read_text())["compress"]["image"]["entrypoint"] == [""]
    assert "args '--entrypoint='" in (ROOT / "examples/Jenkinsfile").read_text()
    assert 'ENTRYPOINT ["compress"]' in (ROOT / "Containerfile").read_text()


def test_what_the_pipelines_install_can_sign_and_track():
    for name in ("action.yml", "Containerfile"):
        assert "[mlflow,sign]" in (ROOT / name).read_text()
