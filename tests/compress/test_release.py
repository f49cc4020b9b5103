"""The whole release with a tiny model: run with `push`, fetch it back, verify, sign, and ask again."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hub_server import TOKEN, HubServer

ROOT = Path(__file__).parents[2]
REPO = "org/tiny-fp8"
SMALL = ("evals.documents.text.count=20", "evals.documents.text.max_tokens=16", "evals.problems.math.count=20",
         "device=cpu")  # fmt: skip


def compress(*words, cwd, **environment):
    command = [sys.executable, "-m", "compress", *words]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def released(tiny_models, tmp_path_factory):
    """A run that published its output: the folder, the server, and what the command printed."""
    folder, server = tmp_path_factory.mktemp("release"), HubServer()
    settings = {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
    }
    words = ("run", "recipe=fp8.yaml", f"model={tiny_models('llama')}", *SMALL, f"push.repo={REPO}")
    done = compress(*words, "--json", cwd=folder, **settings)
    assert done.returncode == 0, done.stderr
    yield folder, server, settings, words, json.loads(done.stdout)
    server.close()


def test_a_run_with_push_publishes_what_passed(released):
    _, server, _, _, found = released
    assert found["pushed"]["repo"] == REPO and found["pushed"]["commit"] == server.repos[REPO].refs["main"]
    assert found["run"]["evaluation_peak_bytes"].keys() == {"source", "variant"}


def test_it_loads_from_the_hub_and_the_copy_verifies(released, tmp_path):
    folder, _, settings, _, _ = released
    fetched = fetch(tmp_path, settings)
    assert fetched.returncode == 0, fetched.stderr
    verified = compress("verify", str(tmp_path / "copy"), cwd=folder)
    assert verified.returncode == 0 and verified.stdout.startswith("holds: PASS\n")


def fetch(folder, settings):
    """Fetch with the hub's own client, and load with transformers, in a process that sees only the server."""
    program = f"""
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
snapshot_download({REPO!r}, local_dir="copy")
tokenizer = AutoTokenizer.from_pretrained({REPO!r})
model = AutoModelForCausalLM.from_pretrained({REPO!r})
print(model(**tokenizer("abc", return_tensors="pt")).logits.isfinite().all().item())
"""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=300)


def test_the_same_question_is_not_measured_again(released):
    folder, _, settings, words, found = released
    again = compress(*words, "--overwrite", "--json", cwd=folder, **settings)
    assert again.returncode == 0, again.stderr
    assert "nothing is measured" in again.stderr and "scoring" not in again.stderr
    assert json.loads(again.stdout)["gate"]["metrics"] == found["gate"]["metrics"]
    page = (folder / "out/fp8/evidence/report.html").read_text()
    assert json.loads(again.stdout)["run"]["recalled"] and "The scores are those of an earlier run" in page


def test_another_margin_is_another_attempt_and_shown(released):
    folder, _, settings, words, _ = released
    options = [word for word in words if not word.startswith("push")]
    again = compress(*options, "gate.metrics.text.max_increase=9%", "--overwrite", cwd=folder, **settings)
    assert again.returncode == 0, again.stderr
    assert "attempt 2 of these bytes; the others ended in PASS" in again.stderr
    lines = (folder / "out/fp8/evidence/attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["PASS"]
    page = (folder / "out/fp8/evidence/report.html").read_text()
    assert "This is attempt 2 of these bytes" in page and "With 95% confidence" in page


def test_a_blocked_run_is_waived_by_name_and_accepted_by_hand(released):
    folder, server, settings, words, found = released
    command = [*(word for word in words if not word.startswith("push")), "output=out/waived", "--overwrite",
               "gate.metrics.kl.required=true", "gate.metrics.kl.max=1e-9"]  # fmt: skip
    waiver = {"metric": "kl", "checkpoint_sha256": found["gate"]["binds"]["variant_manifest"], "reason": "known",
              "by": "Ada", "until": "9999-01-01"}  # fmt: skip
    command.append(f"gate.waivers={json.dumps([waiver])}")
    waived = compress(*command, "--json", cwd=folder, **settings)
    assert waived.returncode == 3 and json.loads(waived.stdout)["gate"]["verdict"] == "WAIVED"
    assert not (folder / "out/waived").exists()
    assert compress(*command, "--accept-waivers", cwd=folder, **settings).returncode == 0
    pushed = ("push", "out/waived", "repo=org/waived")
    refused = compress(*pushed, cwd=folder, **settings)
    assert refused.returncode == 3 and "add --accept-waivers if that is meant" in refused.stderr
    accepted = compress(*pushed, "--accept-waivers", cwd=folder, **settings)
    assert accepted.returncode == 0, accepted.stderr
    card = server.repos["org/waived"].tree("main")["README.md"].content.decode()
    assert "> **WAIVED, not passed.**" in card and "waived by Ada until 9999-01-01: known" in card


def test_a_run_whose_push_fails_shows_its_verdict_and_exits_with_6(released):
    folder, server, settings, words, _ = released
    server.fault("/commit/", 403, times=9, message="no")
    options = [word for word in words if not word.startswith("push")]
    done = compress(*options, "push.repo=org/none", "--overwrite", "--json", cwd=folder, **settings)
    server.faults.clear()
    assert done.returncode == 6 and "org/none was not pushed: 403 no" in done.stderr
    found = json.loads(done.stdout)
    assert found["gate"]["verdict"] == "PASS" and found["pushed"] is None and (folder / "out/fp8").exists()


def test_sign_and_compare_from_the_command_line(released, tmp_path):
    folder, _, settings, _, _ = released
    for words in (["genpkey", "-algorithm", "ed25519", "-out", "key.pem"],
                  ["pkey", "-in", "key.pem", "-pubout", "-out", "key.pub"]):  # fmt: skip
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True)
    output = str(folder / "out/fp8")
    signed = compress("sign", output, f"key={tmp_path / 'key.pem'}", cwd=folder)
    assert signed.returncode == 0, signed.stderr
    verified = compress("verify", output, "--public-key", str(tmp_path / "key.pub"), cwd=folder)
    assert verified.returncode == 0, verified.stdout
    assert compress("sign", output, cwd=folder).returncode == 2
    compared = compress("compare", output, output, "--page", str(tmp_path / "c.html"), cwd=folder, **settings)
    assert compared.returncode == 0 and (tmp_path / "c.html").exists()


@pytest.mark.parametrize(
    ("more", "code", "verdict"),
    [("", 0, "PASS"), ("gate.metrics.kl.required=true\ngate.metrics.kl.max=1e-9", 3, "FAIL")],
    ids=["pass", "block"],
)
def test_the_steps_of_the_action(released, tmp_path, more, code, verdict):
    """As a runner does it: each `run` by bash with its environment; the installer is a stand-in, compress is not."""
    folder, _, settings, words, _ = released
    options = "\n".join([*(word for word in words[2:] if not word.startswith("push")), f"output={tmp_path}/out", more])
    inputs = {"recipe": "fp8.yaml", "options": options, "accept-waivers": "false", "torch-index": "https://index"}
    values = {f"inputs.{name}": value for name, value in inputs.items()}
    values |= {"github.action_path": str(ROOT), "runner.temp": str(tmp_path)}
    runner = settings | {"RUNNER_TEMP": str(tmp_path), "GITHUB_OUTPUT": str(tmp_path / "outputs"),
                         "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "GITHUB_ACTIONS": "true",
                         "PATH": f"{installer(tmp_path)}:{os.environ['PATH']}"}  # fmt: skip
    steps = [step for step in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"] if "run" in step]
    done = None
    for step in steps:
        assert done is None or done.returncode == 0
        given = {name: re.sub(r"\$\{\{ (\S+) \}\}", lambda m: values[m[1]], v) for name, v in step["env"].items()}
        done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=folder, capture_output=True,
                              env=os.environ | runner | given, text=True, timeout=300)  # fmt: skip
    assert done.returncode == code, done.stderr
    output = tmp_path / ("out" if code == 0 else "out.blocked")
    assert (tmp_path / "outputs").read_text() == f"output={output}\nverdict={verdict}\n"
    assert (tmp_path / "summary.md").read_text().startswith(f"# {verdict}\n")
    assert (output / "evidence/junit.xml").exists() and ("::error" in done.stdout) is (code != 0)
    installed = (tmp_path / "installed").read_text().splitlines()
    assert installed[0].endswith("--index-url https://index torch") and installed[1].endswith(f"{ROOT}[mlflow,sign]")


def installer(folder):
    """A `python` whose environments hold a pip that only notes its words, and this very compress."""
    (folder / "path").mkdir()
    program = folder / "path" / "python"
    program.write_text(f"""#!/bin/sh
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >>{folder}/installed\\n' >"$3/bin/pip"
printf '#!/bin/sh\\nexec {sys.executable} -m compress "$@"\\n' >"$3/bin/compress"
chmod +x "$3"/bin/*
""")
    program.chmod(0o755)
    return program.parent


def test_push_from_the_command_line(released):
    folder, server, settings, _, _ = released
    pushed = compress("push", "out/fp8", "repo=org/again", "private=false", "--json", cwd=folder, **settings)
    assert pushed.returncode == 0, pushed.stderr
    assert json.loads(pushed.stdout)["repo"] == "org/again" and not server.repos["org/again"].private
    denied = compress("push", "out/fp8", "repo=org/denied", cwd=folder, **settings | {"HF_TOKEN": "hf_wrong"})
    assert denied.returncode == 6
    assert "org/denied was not pushed: 401" in denied.stderr and "hf_wrong" not in denied.stderr


def test_a_model_on_the_hub_is_a_source(released, tmp_path):
    """Planned from headers alone, then run from the hub's cache, which is made of links."""
    _, server, settings, _, _ = released
    server.create("org/base", private=False, **model_files(released))
    home = settings | {"HF_HOME": str(tmp_path / "hf")}
    words = ("run", "recipe=int8.yaml", "model=org/base", *SMALL)
    planned = compress(*words, "--dry-run", cwd=tmp_path, **home)
    assert planned.returncode == 0, planned.stderr
    assert "mlp.down_proj" in planned.stdout and not list((tmp_path / "hf").rglob("*.safetensors"))
    inspected = compress("inspect", "org/base", "--json", cwd=tmp_path, **home)
    assert json.loads(inspected.stdout)["model_type"] == "llama"
    done = compress(*words, "--json", cwd=tmp_path, **home)
    assert done.returncode == 0, done.stderr
    assert any(path.is_symlink() for path in (tmp_path / "hf").rglob("*.safetensors"))
    assert not [path for path in (tmp_path / "out/int8").rglob("*") if path.is_symlink()]


def model_files(released):
    """The source of the released run, file by file."""
    source = next(word for word in released[3] if word.startswith("model=")).removeprefix("model=")
    return {path.name: path.read_bytes() for path in Path(source).iterdir()}
