"""The warm start: blocks alone, one after the other, towards those of the teacher."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.errors import Diverged, RecipeError
from compress.recipe import Stage
from compress.stage_plan import Place
from compress.stages import plan_stages, run_stage
from compress.walk_journal import Journal
from distill.blocks import WarmUp, warm_blocks
from tests.compress.test_stage_distill import OPTIONS, damage

TOKENS = torch.arange(3, 99).reshape(4, 24)
PLAN = WarmUp(steps=8, batch=2, learning_rate=2e-3)


def warm(student, teacher, folder, plan=PLAN):
    where = (torch.device("cpu"), lambda _: None)
    journal = Journal(folder, writes=True)
    return warm_blocks(Checkpoint.open(student), Checkpoint.open(teacher), TOKENS, plan, journal, where), journal


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_every_block_comes_closer_to_the_teachers(tiny_models, tmp_path, kind):
    student = damage(tiny_models(kind), tmp_path / "student")
    errors, journal = warm(student, tiny_models(kind), tmp_path / "journal")
    assert len(errors) == 2 and all(after < 0.8 * before for before, after in errors)
    assert journal.parts() == ["model.layers.0", "model.layers.1"]


def test_the_error_is_that_of_a_slow_twin(tiny_models, tmp_path):
    student = damage(tiny_models("llama"), tmp_path / "student")
    ((before, _), _), _ = warm(student, tiny_models("llama"), tmp_path / "journal")
    sides = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (tiny_models("llama"), student)]
    hidden = sides[0].model.embed_tokens(TOKENS[:2])
    positions = sides[0].model.rotary_emb(hidden, torch.arange(24)[None])
    wanted, found = (side.model.layers[0](hidden, position_embeddings=positions) for side in sides)
    pairs = zip(wanted.flatten(0, 1), found.flatten(0, 1), strict=True)
    errors = [((y - x).norm() ** 2 / y.norm() ** 2).item() for y, x in pairs]
    assert before == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_a_student_like_its_teacher_stays_as_it_is(tiny_models, tmp_path):
    source = tiny_models("llama")
    errors, journal = warm(source, source, tmp_path / "journal")
    assert errors == [(0, 0), (0, 0)]
    checkpoint = Checkpoint.open(source)
    for part in journal.parts():
        assert all(torch.equal(tensor, checkpoint.read(name).float()) for name, tensor in journal.tensors(part))


def test_finished_blocks_are_not_trained_again(tiny_models, tmp_path):
    student = damage(tiny_models("llama"), tmp_path / "student")
    whole, journal = warm(student, tiny_models("llama"), tmp_path / "journal")
    (journal.path("model.layers.1")).unlink()
    stamp = journal.path("model.layers.0").stat().st_mtime_ns
    again, _ = warm(student, tiny_models("llama"), tmp_path / "journal")
    assert again == whole and journal.path("model.layers.0").stat().st_mtime_ns == stamp


def test_an_error_that_is_not_finite_is_refused(tiny_models, tmp_path):
    student = damage(tiny_models("llama"), tmp_path / "student")
    tensors = load_file(student / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, student / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Diverged, match=r"the error of model\.layers\.1 is nan: lower warm_start\.learning_rate"):
        warm(student, tiny_models("llama"), tmp_path / "journal")


def stage(source, folder, teacher, **options):
    wanted = Stage.model_validate({"distill": {**OPTIONS, "teacher": str(teacher), **options}})
    (plan,) = plan_stages([wanted], Checkpoint.open(source), Place(folder, 10**9))
    return plan, lambda: run_stage(plan, torch.device("cpu"), lambda _: None)


def test_training_starts_from_a_lower_divergence(tiny_models, tmp_path):
    student = damage(tiny_models("llama"), tmp_path / "student", part=".mlp.")
    calibration = {"documents": "python-docs", "problems": None, "samples": 16, "length": 64}
    options = {"steps": 30, "learning_rate": 1e-3, "calibration": calibration}
    _, cold = stage(student, tmp_path / "cold", tiny_models("llama"))
    plan, run = stage(student, tmp_path / "warm", tiny_models("llama"), warm_start=options)
    report = run()
    assert report["curve"][0]["kl"] < 0.7 * cold()["curve"][0]["kl"]
    assert report["warm_start"]["after"] < report["warm_start"]["before"]
    assert {n: i.spec for n, i in Checkpoint.open(plan.result.path).tensors.items()} == {
        n: i.spec for n, i in Checkpoint.open(student).tensors.items()
    }
    assert [path.name for path in (tmp_path / "warm").glob("*.journal")] == []


def test_students_with_other_blocks_are_refused(tiny_models, tmp_path):
    student = damage(tiny_models("llama"), tmp_path / "student")
    config = (student / "config.json").read_text()
    (student / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    message = "distill.warm_start pairs blocks, but num_hidden_layers is 1 in the student and 2 in the teacher"
    with pytest.raises(RecipeError, match=re.escape(message)):
        stage(student, tmp_path, tiny_models("llama"), warm_start={"steps": 3})
