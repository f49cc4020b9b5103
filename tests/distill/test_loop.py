"""The loop on tiny models: what it learns, that it does not depend on how a batch is cut, and that it can be killed."""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch

from compress.errors import Diverged, InputError
from distill.loop import Stop, train
from distill.losses import Loss
from distill.pair import Student, Teacher
from distill.schedule import Schedule
from distill.state import read_best
from tests.distill.pairs import build_student
from tests.processes import start_ranks

SCHEDULE = Schedule(steps=4, batch=8, micro_batch=8, learning_rate=1e-3)
STOP = Stop(evaluate_every=4, patience=9)


def weights(folder):
    return sum(float(tensor.abs().sum()) for tensor in read_best(folder).values())


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_the_student_comes_closer_to_its_teacher(student, teacher, make_rows, folder, divergence):
    schedule = replace(SCHEDULE, steps=40, learning_rate=5e-3)
    progress = train(student, teacher, make_rows(40, 8), (Loss(divergence), schedule, Stop(10)), folder)
    assert len(progress.losses) == 40 and [entry["step"] for entry in progress.curve] == [0, 10, 20, 30, 40]
    assert progress.losses[-1] < 0.6 * progress.losses[0]
    assert progress.best["kl"] < 0.9 * progress.curve[0]["kl"]


def test_the_loss_is_the_mean_over_all_learnt_tokens(student, teacher, make_rows, folder):
    data = make_rows(1, 8)
    rows = data.train[data.order]
    with torch.no_grad():
        ours, theirs = (model(input_ids=rows.ids).logits[:, :-1].log_softmax(-1) for model in (student, teacher))
    expected = (theirs.exp() * (theirs - ours)).sum(-1)[rows.learnt[:, 1:]].mean()
    progress = train(student, teacher, data, (Loss(), replace(SCHEDULE, steps=1), STOP), folder)
    assert progress.losses == [pytest.approx(float(expected), rel=1e-5)]


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_micro_batches_do_not_change_anything(student, teacher, make_rows, tmp_path, micro_batch):
    whole = train(student, teacher, make_rows(4, 8), (Loss(), SCHEDULE, STOP), tmp_path / "whole")
    schedule = replace(SCHEDULE, micro_batch=micro_batch, gradient_checkpointing=True)
    parts = train(build_student(), teacher, make_rows(4, 8), (Loss(), schedule, STOP), tmp_path / "parts")
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert weights(tmp_path / "parts") == pytest.approx(weights(tmp_path / "whole"), rel=1e-6)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_processes_do_not_change_anything(student, teacher, make_rows, tmp_path, sharded):
    whole = train(student, teacher, make_rows(4, 8), (Loss(), SCHEDULE, STOP), tmp_path / "whole")
    found = in_processes(2, tmp_path / "two", replace(SCHEDULE, micro_batch=2), sharded=sharded)
    assert found["sharded"] == sharded
    assert found["losses"] == pytest.approx(whole.losses, rel=1e-5)
    assert found["kl"] == pytest.approx([entry["kl"] for entry in whole.curve], rel=1e-5)
    assert found["weights"] == pytest.approx(weights(tmp_path / "whole"), rel=1e-6)


def in_processes(count, folder, schedule, *, sharded):
    """Train under `count` processes as torchrun would start them; what the first wrote down."""
    words = ("tests.distill.ranks", str(folder), json.dumps(asdict(schedule)))
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **({"SHARDED": "1"} if sharded else {})}
    running = start_ranks(count, *words, **settings)
    for process in running:
        process.communicate(timeout=120)
    assert [process.returncode for process in running] == [0] * count
    return json.loads((folder / "found.json").read_text())


class Killed(Exception):
    """Stands for a kill after an update."""


def test_a_killed_run_goes_on_to_the_same_end(student, teacher, make_rows, tmp_path):
    plan = (Loss(), replace(SCHEDULE, steps=12), Stop(4, 9))
    whole = train(student, teacher, make_rows(12, 8), plan, tmp_path / "whole")

    def kill(progress, _):
        if progress.step == 7:
            raise Killed

    with pytest.raises(Killed):
        train(build_student(), teacher, make_rows(12, 8), plan, tmp_path / "killed", kill)
    again = train(build_student(), teacher, make_rows(12, 8), plan, tmp_path / "killed")
    assert again.losses == whole.losses
    assert [entry["kl"] for entry in again.curve] == [entry["kl"] for entry in whole.curve]
    left, right = read_best(tmp_path / "killed"), read_best(tmp_path / "whole")
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_it_ends_when_it_gets_no_better_and_keeps_the_best(student, teacher, make_rows, folder):
    schedule = replace(SCHEDULE, steps=60, learning_rate=0.5, clip=1e9)  # far too fast, yet finite
    before = Student(student).divergence(make_rows(60, 8).held_out, Teacher(teacher), 8)
    progress = train(student, teacher, make_rows(60, 8), (Loss(), schedule, Stop(2, 3)), folder)
    assert progress.step == 6 and progress.best == {"step": 0, "kl": pytest.approx(before)}
    student.load_state_dict(read_best(folder))
    assert Student(student).divergence(make_rows(60, 8).held_out, Teacher(teacher), 8) == pytest.approx(before)


def test_a_loss_that_is_not_finite_stops_and_keeps_what_was_good(student, teacher, make_rows, folder):
    data = make_rows(8, 8)

    def spoil(progress, _):
        if progress.step == 5:
            with torch.no_grad():
                next(student.parameters())[:] = float("nan")

    message = re.escape(
        "the loss of step 6 is nan and its gradient's norm nan: lower training.learning_rate, 0.001 now"
    )
    with pytest.raises(Diverged, match=message) as caught:
        train(student, teacher, data, (Loss(), replace(SCHEDULE, steps=8), Stop(4)), folder, spoil)
    assert caught.value.exit_code == 5
    assert all(tensor.isfinite().all() for tensor in read_best(folder).values())
    assert [path.name for path in folder.glob("state-*")] == ["state-000004"]


def test_a_student_that_is_broken_from_the_start_is_refused(student, teacher, make_rows, folder):
    with torch.no_grad():
        student.model.layers[0].mlp.down_proj.weight[:] = float("nan")
    with pytest.raises(Diverged, match="the KL on the rows held out is nan at step 0"):
        train(student, teacher, make_rows(4, 8), (Loss(), SCHEDULE, STOP), folder)


def test_a_batch_that_ranks_cannot_share_is_refused(student, teacher, make_rows, folder, monkeypatch):
    monkeypatch.setattr("accelerate.Accelerator.num_processes", 3)
    with pytest.raises(InputError, match=r"training\.batch is 8, which 3 processes cannot share evenly"):
        train(student, teacher, make_rows(4, 8), (Loss(), SCHEDULE, STOP), folder)
