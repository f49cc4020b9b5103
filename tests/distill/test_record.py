"""A teacher that was asked beforehand: the same curve as one that is there, and answers that outlive a kill."""

from dataclasses import replace

import pytest
import torch

from distill.loop import Stop, train
from distill.losses import Loss
from distill.pair import Recorded, Student, Teacher
from distill.record import Asked, record
from distill.schedule import Schedule
from tests.distill.pairs import SIZES, build_student

VOCABULARY = SIZES["vocab_size"]
SCHEDULE = Schedule(steps=6, batch=8, micro_batch=4, learning_rate=1e-3)


def asked(data, teacher, folder, k, temperature=1.0):
    """The data with the teacher's answers."""
    held_out = Asked("a teacher", k, VOCABULARY)
    of = Teacher(teacher)
    return replace(
        data,
        train=record(of, data.train, replace(held_out, temperature=temperature), folder),
        held_out=record(of, data.held_out, held_out, folder),
    )


@pytest.mark.parametrize("loss", [Loss(), Loss("jsd", temperature=2.0, ce=0.1)], ids=["forward", "warm jsd"])
def test_all_ids_give_the_curve_of_a_teacher_that_is_there(student, teacher, make_rows, tmp_path, loss):
    data, plan = make_rows(6, 8), (loss, SCHEDULE, Stop(3))
    there = train(student, teacher, data, plan, tmp_path / "there")
    recorded = asked(data, teacher, tmp_path, VOCABULARY, loss.temperature)
    gone = train(build_student(), None, recorded, plan, tmp_path / "gone")
    assert gone.losses == pytest.approx(there.losses, rel=1e-5)
    assert [entry["kl"] for entry in gone.curve] == pytest.approx([entry["kl"] for entry in there.curve], rel=1e-5)


def test_a_few_ids_bring_the_student_closer_too(student, teacher, make_rows, tmp_path):
    data = make_rows(40, 8)
    before = Student(student).divergence(data.held_out, Teacher(teacher), 8)
    plan = (Loss(), replace(SCHEDULE, steps=40, learning_rate=5e-3), Stop(10))
    train(student, None, asked(data, teacher, tmp_path, 8), plan, tmp_path / "run")
    assert Student(student).divergence(data.held_out, Teacher(teacher), 8) < 0.9 * before


def test_a_row_is_asked_once(teacher, make_rows, tmp_path, monkeypatch):
    rows, asked_rows = make_rows(1, 8).train, []
    states = Teacher.states

    def counted(self, ids):
        if len(asked_rows) == 5:
            raise KeyboardInterrupt
        asked_rows.append(ids)
        return states(self, ids)

    monkeypatch.setattr(Teacher, "states", counted)
    of = Asked("a teacher", 4, VOCABULARY)
    with pytest.raises(KeyboardInterrupt):
        record(Teacher(teacher), rows, of, tmp_path)
    monkeypatch.setattr(Teacher, "states", states)
    seen = []
    again = record(Teacher(teacher), rows, of, tmp_path, seen.append)
    whole = record(Teacher(teacher), rows, of, tmp_path / "whole")
    assert seen == [5, *[1] * 11]
    assert torch.equal(again.top.ids, whole.top.ids) and torch.equal(again.top.log_p, whole.top.log_p)


@pytest.mark.parametrize(
    "change",
    [{"teacher": "another"}, {"k": 5}, {"vocabulary": VOCABULARY - 1}, {"temperature": 2.0}],
    ids=["teacher", "k", "vocabulary", "temperature"],
)
def test_answers_are_those_to_the_same_question(teacher, make_rows, tmp_path, change):
    rows, of = make_rows(1, 8).train, Asked("a teacher", 4, VOCABULARY)
    record(Teacher(teacher), rows, of, tmp_path)
    for other in ((rows, replace(of, **change)), (replace(rows, ids=rows.ids.flip(0)), of)):
        seen = []
        record(Teacher(teacher), *other, tmp_path, seen.append)
        assert seen[0] == 0  # nothing was taken over


def test_rows_that_nobody_was_asked_about_are_refused(make_rows):
    with pytest.raises(ValueError, match="the rows bring no predictions of a teacher"):
        Recorded().targets(make_rows(1, 8).train)
