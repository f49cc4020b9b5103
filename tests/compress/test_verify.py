"""Every single tampering is found and named; what is left alone verifies to the verdict it had."""

import json
import math
import re

import pytest
import yaml

from compress import verify as module
from compress.errors import InputError, Refused
from compress.evidence_files import Plan
from compress.manifest import sha256_file
from compress.verify import verify
from evals.gate import Metric, decide


def edit_json(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record, indent=2, sort_keys=True))


def edit_lock(path, change):
    lock = yaml.safe_load(path.read_text())
    change(lock["plan"])
    path.write_text(yaml.safe_dump(lock, sort_keys=False))


def drop_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def update_sums(folder):
    """What a forger does who knows of SHA256SUMS and not of the hashes in gate.json."""
    names = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    lines = [f"{sha256_file(folder / name)}  {name}\n" for name in names if (folder / name).exists()]
    (folder / "SHA256SUMS").write_text("".join(lines))
    (folder / "test-result.intoto.json").unlink(missing_ok=True)


def update_binds(folder):
    """And one who also knows the hashes and counts in gate.json."""

    def change(gate):
        binds = gate["binds"]
        binds["files"] = {name: sha256_file(folder / name) for name in binds["files"]}
        binds["rows"] = {name: len((folder / name).read_text().splitlines()) for name in binds["rows"]}

    edit_json(folder / "gate.json", change)
    update_sums(folder)


@pytest.mark.parametrize(
    ("shift", "verdict", "code"), [(0.005, "PASS", 0), (0.2, "FAIL", 3), (0.028, "INCONCLUSIVE", 4)]
)
def test_untouched_evidence_holds_with_its_verdict_and_exit_code(make_run, shift, verdict, code):
    directory, gate = make_run(shift)
    report = verify(directory)
    assert report.problems == ()
    assert (report.verdict, report.exit_code) == (verdict, code) == (gate["verdict"], gate["exit_code"])


def test_refused_evidence_holds_as_refused(make_run):
    directory, _ = make_run(refusals=["the tokenizers differ"])
    report = verify(directory)
    assert (report.verdict, report.exit_code, report.problems) == ("REFUSED", 5, ())


def test_a_fail_that_ended_the_evaluation_early_holds(make_run):
    directory, gate = make_run(0.2)
    cut = gate["metrics"][:1]
    edit_json(directory / "evidence" / "gate.json", lambda record: record.update(metrics=cut))
    update_sums(directory / "evidence")
    assert verify(directory).problems == () and verify(directory).verdict == "FAIL"


def flip(directory, name="model.safetensors"):
    content = bytearray((directory / name).read_bytes())
    content[1000] ^= 1
    (directory / name).write_bytes(content)


TAMPERINGS = {
    "flipped byte in a shard": (flip, "model.safetensors has other bytes than those in the manifest"),
    "added shard": (
        lambda d: (d / "extra.safetensors").write_bytes(b"x"),
        "extra.safetensors is in the directory and not in the manifest",
    ),
    "missing file": (
        lambda d: (d / "config.json").unlink(),
        "config.json is in the manifest and not in the directory",
    ),
    "edited number": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g["metrics"][0].update(upper=0.001)),
        r"gate.json says of text: upper 0.001; the stored rows and recipe.lock.yaml give upper 0.00\d+",
    ),
    "edited flips": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g["metrics"][3]["extra"].update(b=0)),
        "gate.json says of task: b 0; the stored rows and recipe.lock.yaml give b 2",
    ),
    "edited verdict of a metric": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g["metrics"][1].update(verdict="FAIL")),
        "gate.json says of math: verdict FAIL; the stored rows and recipe.lock.yaml give verdict PASS",
    ),
    "edited overall verdict": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g.update(verdict="FAIL", exit_code=3)),
        "gate.json says of the whole: exit_code 3, verdict FAIL; "
        "the stored rows and recipe.lock.yaml give exit_code 0, verdict PASS",
    ),
    "removed metric": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g["metrics"].pop(1)),
        "gate.json says of the whole: exit_code 0, verdict PASS; "
        "the stored rows and recipe.lock.yaml give exit_code 5, verdict REFUSED",
    ),
    "invented metric": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g["metrics"].append({"id": "more", "extra": {}})),
        "gate.json holds results of more, which recipe.lock.yaml does not name",
    ),
    "edited alpha": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g.update(alpha=0.01)),
        "alpha is 0.05 in recipe.lock.yaml and 0.01 in gate.json",
    ),
    "edited reason": (
        lambda d: edit_json(d / "evidence/gate.json", lambda g: g.update(reason="trust me")),
        "gate.json was changed: its sha256 is not the one in SHA256SUMS",
    ),
    "dropped rows of the variant": (
        lambda d: drop_last_line(d / "evidence/samples/docs.variant.jsonl"),
        "samples/docs.variant.jsonl holds 39 rows, gate.json was decided on 40",
    ),
    "edited row": (
        lambda d: (path := d / "evidence/samples/sums.variant.jsonl").write_text(
            path.read_text().replace('"tokens":100}', '"tokens":100 }', 1)
        ),
        "samples/sums.variant.jsonl was changed: its sha256 is not the one in SHA256SUMS and gate.json",
    ),
    "missing rows": (
        lambda d: (d / "evidence/samples/sums.variant.jsonl").unlink(),
        "samples/sums.variant.jsonl is missing from the evidence",
    ),
    "changed margin": (
        lambda d: edit_lock(d / "evidence/recipe.lock.yaml", lambda p: p["metrics"][0].update(margin=0.5)),
        "gate.json says of text: (increase_margin .*, )?margin 0.029.*; "
        "the stored rows and recipe.lock.yaml give (increase_margin .*, )?margin 0.405.*",
    ),
    "another recipe": (
        lambda d: edit_lock(d / "evidence/recipe.lock.yaml", lambda p: p.update(data={"docs": {"sha256": "cd"}})),
        "recipe.lock.yaml holds another plan than the one that was decided by",
    ),
    "edited recipe beside the plan": (
        lambda d: (path := d / "evidence/recipe.lock.yaml").write_text(path.read_text().replace("demo", "other")),
        "recipe.lock.yaml was changed: its sha256 is not the one in SHA256SUMS and gate.json",
    ),
    "edited manifest": (
        lambda d: edit_json(d / "evidence/manifest.json", lambda m: m["files"].pop()),
        "manifest.json lists other files than those that were measured",
    ),
    "edited manifest of the source": (
        lambda d: edit_json(d / "evidence/baseline.manifest.json", lambda m: m["files"].pop()),
        "baseline.manifest.json lists other files than those that were measured",
    ),
    "edited report": (
        lambda d: (d / "evidence/report.md").write_text("# PASS"),
        "report.md was changed: its sha256 is not the one in SHA256SUMS",
    ),
    "added evidence": (
        lambda d: (d / "evidence/samples/new.jsonl").write_text(""),
        "samples/new.jsonl was added to the evidence",
    ),
    "edited sums": (
        lambda d: (path := d / "evidence/SHA256SUMS").write_text(path.read_text().replace("a", "b")),
        "junit.xml was changed: its sha256 is not the one in SHA256SUMS",
    ),
}


@pytest.mark.parametrize(("tamper", "sentence"), TAMPERINGS.values(), ids=TAMPERINGS)
def test_a_single_tampering_is_named_and_refused(make_run, tamper, sentence):
    directory, _ = make_run()
    tamper(directory)
    report = verify(directory)
    assert report.exit_code == 5
    assert any(re.fullmatch(sentence, problem) for problem in report.problems), report.problems


@pytest.mark.parametrize(
    "name",
    ["edited number", "edited overall verdict", "dropped rows of the variant", "changed margin", "another recipe"],
)
def test_updating_the_sums_does_not_hide_it(make_run, name):
    directory, _ = make_run()
    tamper, sentence = TAMPERINGS[name]
    tamper(directory)
    update_sums(directory / "evidence")
    report = verify(directory)
    assert report.exit_code == 5
    assert any(re.fullmatch(sentence, problem) for problem in report.problems), report.problems


def test_rows_dropped_on_both_sides_contradict_the_declared_count_even_if_every_hash_is_updated(make_run):
    directory, _ = make_run()
    for side in ("baseline", "variant"):
        drop_last_line(directory / f"evidence/samples/docs.{side}.jsonl")
    assert "samples/docs.baseline.jsonl holds 39 rows, gate.json was decided on 40" in verify(directory).problems
    update_binds(directory / "evidence")
    report = verify(directory)
    assert report.exit_code == 5 and report.verdict == "REFUSED"
    assert any(re.match("gate.json says of text: .*n 40.*; .*n 39.*", problem) for problem in report.problems)


def test_refusals_over_what_json_cannot_say_hold(make_run):
    rows = [{"id": f"d{i}", "hash": "h", "tokens": 9, "nll": 20.0} for i in range(30)]
    metric = Metric(id="text", kind="log_perplexity", data="docs", margin=0.03)
    result = decide(metric, rows, rows, alpha=0.05, aa_difference=math.nan)
    directory, _ = make_run(plan=Plan(0.05, (metric,)), results=[result], rows={"docs": (rows, rows)})
    report = verify(directory)
    assert (report.problems, report.verdict) == ((), "REFUSED")


def test_signatures_and_statements_may_be_added_later(make_run):
    directory, _ = make_run()
    for name in ("SHA256SUMS.sig", "bundle.sigstore", "test-result.dsse.json"):
        (directory / "evidence" / name).write_text("later")
    (directory / "README.md").write_text("card")
    assert verify(directory).problems == ()


def test_another_place_of_the_same_output_verifies(make_run, tmp_path):
    directory, _ = make_run()
    moved = directory.rename(tmp_path / "run.blocked")
    assert verify(moved).problems == ()


def test_links_in_the_output_are_refused(make_run):
    directory, _ = make_run()
    (directory / "link").symlink_to(directory / "config.json")
    with pytest.raises(Refused, match="is a link"):
        verify(directory)


@pytest.mark.parametrize("name", ["SHA256SUMS", "manifest.json", "recipe.lock.yaml"])
def test_a_missing_link_of_the_chain_is_refused(make_run, name):
    directory, _ = make_run()
    (directory / "evidence" / name).unlink()
    with pytest.raises(Refused, match=f"^{re.escape(name)} cannot be read: "):
        verify(directory)


def test_no_evidence_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"holds no evidence/gate\.json"):
        verify(tmp_path)


def test_progress_counts_the_weights(make_run):
    directory, _ = make_run()
    seen = []
    verify(directory, progress=seen.append)
    assert sum(seen) == 2050


def test_show_prints_the_verdict_and_the_seal(make_run, capsys):
    directory, _ = make_run()
    assert module.show(directory, as_json=False) == 0
    out = capsys.readouterr().out
    assert out.startswith("holds: PASS\n") and verify(directory).seal in out


def test_show_prints_each_problem(make_run, capsys):
    directory, _ = make_run()
    flip(directory)
    assert module.show(directory, as_json=False) == 5
    assert capsys.readouterr().out == (
        "- model.safetensors has other bytes than those in the manifest\ndoes not hold, for the reasons above\n"
    )


def test_show_as_json(make_run, capsys):
    directory, _ = make_run()
    assert module.show(directory, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["exit_code"], report["problems"]) == ("PASS", 0, [])
