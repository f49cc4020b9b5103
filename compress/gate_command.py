"""`compress gate BASELINE VARIANT`: judge two checkpoints that exist already, ours or any other tool's."""

import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from compress.checkpoint import Checkpoint
from compress.device import resolve_device
from compress.errors import InputError
from compress.evaluation import load_sets
from compress.evidence import write_evidence
from compress.fit import check_fit, fit_record
from compress.inputs import local_path
from compress.judgement import hash_side, judge
from compress.manifest import EVIDENCE, STAGED
from compress.outlets import check_outlets, show_elsewhere
from compress.pipeline import show_result
from compress.progress import say
from compress.recipe_file import load_recipe
from compress.replace import publish, restore
from compress.source import check_usable, fetch_source
from compress.waivers import exit_code

__all__ = ["gate"]


def gate(
    models: tuple[str, str],
    recipe_words: tuple[str, Sequence[str]],
    *,
    overwrite: bool,
    accept_waivers: bool,
    as_json: bool,
) -> int:
    """Measure both, decide, and write the evidence into the variant's directory; returns the verdict's exit code.

    Args:
        models: baseline and variant; the variant must be a local directory, since the evidence is written there.
        recipe_words: name and overrides of the recipe whose evals and gate are used.

    Raises:
        CompressError: what cannot be measured.
    """
    started = time.monotonic()
    recipe = load_recipe(*recipe_words)
    resolve_device(recipe.device)
    check_outlets()
    baseline, variant = (Checkpoint.open(fetch_source(model, say=say)) for model in models)
    for side in (baseline, variant):
        check_usable(side, trust_remote_code=recipe.trust_remote_code)
    check_fit(recipe.fit, variant)
    target = _evidence_place(models[1], overwrite=overwrite)
    sets = load_sets(recipe)
    with tempfile.TemporaryDirectory(prefix="compress-gate.") as folder:
        work = Path(folder)
        base = hash_side(baseline.path, "the baseline", links=True)
        judgement = judge(recipe, sets, base, variant.path, work / "evaluation")
        record = {
            "command": shlex.join(["compress", "gate", *models, f"recipe={recipe_words[0]}", *recipe_words[1]]),
            "source": models[0],
            "output": models[1],
            "stages": [],
            "bytes_before": baseline.nbytes,
            "bytes_after": variant.nbytes,
            "seconds": round(time.monotonic() - started, 2),
            **fit_record(recipe.fit, baseline, variant),
            **judgement.costs(),
        }
        found = write_evidence(work, judgement.evidence(recipe, record))
        judgement.write_down(found)
        _publish(work / EVIDENCE, target / EVIDENCE, overwrite=overwrite)
    show_elsewhere(target, found, record)
    show_result(found, record, target, as_json=as_json)
    return exit_code(found, accept_waivers=accept_waivers)


def _evidence_place(variant: str, *, overwrite: bool) -> Path:
    directory = local_path(variant)
    if not directory.is_dir():
        raise InputError(
            f"variant {variant!r} is no local directory, where the evidence is written: save it to one first"
        )
    if restore(directory / EVIDENCE):
        say(f"{directory / EVIDENCE} is back: a run was killed while it replaced it")
    if (directory / EVIDENCE).exists() and not overwrite:
        raise InputError(f"{directory / EVIDENCE} exists: add --overwrite to judge this checkpoint again")
    return directory


def _publish(written: Path, evidence: Path, *, overwrite: bool) -> None:
    """Copy to the variant's disk under a name that no manifest counts, then rename."""
    staged = evidence.with_name(STAGED)
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(written, staged)
    publish(staged, evidence, overwrite=overwrite)
