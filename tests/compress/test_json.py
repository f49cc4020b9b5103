"""Every command takes --json, and then standard output is one JSON document and nothing else."""

import json
import subprocess

import pytest
from huggingface_hub import constants

from compress.cli import app
from compress.errors import CompressError
from tests.hub_server import TOKEN, HubServer

COMMANDS = {command.name or command.callback.__name__: command.callback for command in app.registered_commands}
# {model} a tiny model, {run} and {other} outputs of runs, {key} a private key, {page} a file to write
WORDS = {
    "run": "recipe=fp8.yaml model={model} output={page} --dry-run",
    "verify": "{run}",
    "push": "{run} repo=org/json",
    "sign": "{run} key={key}",
    "compare": "{run} {other} --page {page}",
    "plan": "{model} gpu=L40S users=2 context=256",
    "bench": "{model} baseline={model} prompt=8 output=4 rounds=1",
    "inspect": "{model}",
    "list": "formats",
}
ELSEWHERE = {"gate", "selftest"}  # they measure; with --json in test_run.py


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny_models, write_run):
    folder = tmp_path_factory.mktemp("json")
    for name in ("run", "other"):
        write_run(folder / name, 0.005)
    key = folder / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)], check=True)
    return {"model": tiny_models("llama"), "run": folder / "run", "other": folder / "other", "key": key,
            "page": folder / "page"}  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.close()


def words(name, places, *more):
    return [name, *(word.format(**places) for word in WORDS[name].split()), *more]


def test_every_command_is_here():
    assert WORDS.keys() | ELSEWHERE == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_flag(name):
    assert "as_json" in COMMANDS[name].__annotations__


@pytest.mark.parametrize("name", WORDS)
def test_standard_output_is_one_document(name, places, server, capfd):
    assert not app(words(name, places, "--json"), standalone_mode=False)
    assert json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("topic", ["recipes", "formats", "kv", "tasks"])
def test_every_list_is_one_document(topic, capfd):
    app(["list", topic, "--json"], standalone_mode=False)
    assert json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("name", ["run", "verify", "push", "sign", "inspect", "bench"])
def test_an_error_leaves_standard_output_empty(name, places, server, capfd):
    missing = dict.fromkeys(places, "nowhere")
    with pytest.raises(CompressError):
        app(words(name, missing, "--json"), standalone_mode=False)
    assert capfd.readouterr().out == ""
