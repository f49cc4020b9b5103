import hashlib
import json
import re
from collections import Counter
from itertools import islice

import pytest

from compress.errors import InputError
from evals.problems import TEMPLATES, Problem, _below, arithmetic, read_problems, split_of
from evals.stories import Template

# The answer from the numbers in the order in which the question names them, worked out without the templates' steps.
ANSWERS = {
    "boxes": lambda a, b, c: a * b - c,
    "wages": lambda a, b, c, d: a * b * c - d,
    "discount": lambda n, a, p: n * a * (100 - p) // 100,
    "ages": lambda k, a, b, c: k * a + b + c,
    "journey": lambda a, u, b, v: a * u + b * v,
    "sharing": lambda n, a, b: a * b // n,
    "fraction": lambda a, one, k: a * (k - 2) // k,
    "reading": lambda a, b, w: (5 * a + 2 * b) * w,
    "change": lambda a, p, b, q, c: c - a * p - b * q,
    "saving": lambda a, b, c: (a - b) // c,
    "fence": lambda a, b, c: 2 * (a + b) * c,
    "tiles": lambda a, b, c, d: a * b * d // c,
    "recipe": lambda a, b, c, d: b * c // a - d,
    "tank": lambda a, b, c: a // (b - c),
    "average": lambda a, b, c, d: (a + b + c) // 3 - d,
    "fourth-test": lambda m, a, b, c: 4 * m - a - b - c,
    "doubling": lambda a, b: 8 * a - b,
    "race": lambda a, b, t: (a - b) * t,
    "ratio": lambda a, b, n: n * a // (a + b),
    "minutes": lambda k, m, h: k * m + 60 * h,
    "stock": lambda a, b, c: a * b - 3 * c,
    "bus": lambda a, b, c: (a - b + c) // 2,
    "profit": lambda a, b, c, d: a * (c - b) - d,
    "orchard": lambda a, b, p, c: a * b * (100 - p) * c // 100,
    "load": lambda a, b, c, d, e: a + b * c + d * e,
    "fuel": lambda a, hundred, b, c: a * b * c // hundred,
    "tickets": lambda p, a, b: a * p + b * p // 2,
    "machines": lambda m, n, h, k: n * k // (h * m),
    "collections": lambda a, b: a + 3 * (a + b),
    "cartons": lambda a, d, b, c: (a * d - b) // c,
}


def draw(count, **options):
    return list(islice(arithmetic(**{"seed": 1, **options}), count))


def test_every_template_has_an_independent_answer_and_is_drawn():
    assert set(ANSWERS) == {template.name for template in TEMPLATES}
    assert len(TEMPLATES) == len(ANSWERS) >= 20
    drawn = Counter(problem.template for problem in draw(1500))
    assert min(drawn[name] for name in ANSWERS) > 20


def test_answers_are_what_the_question_asks():
    for problem in draw(1500):
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert problem.answer == ANSWERS[problem.template](*numbers), problem.question
        assert problem.solution.endswith(f"The answer is {problem.answer}.")


def test_every_equation_of_every_solution_holds():
    for problem in draw(1500):
        equations = re.findall(r"(\d+(?: [-+*/] \d+)+) = (\d+)", problem.solution)
        assert 2 <= len(equations) <= 4
        for left, right in equations:
            assert eval(left) == int(right), problem.solution
        assert int(equations[-1][1]) == problem.answer


def test_texts_are_whole_sentences():
    for problem in draw(300):
        assert not re.search(r"[{}\[\]]|  ", problem.question + problem.solution)
        assert re.search(r"\?$", problem.question)
        assert not re.search(r" = 1 ", problem.solution)


def test_same_seed_same_problems_on_every_python():
    text = json.dumps([[p.question, p.solution] for p in draw(200, seed=1234)])
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN


GOLDEN = "b28c67aa0666fc08eddc3390377c4f5a93548db7354a31ad5018f4c945f359c8"


def test_splits_are_disjoint_whatever_the_seeds():
    ours, theirs = draw(2000, seed=5), draw(2000, seed=6, split="calibration") + draw(500, split="calibration")
    keys = [{(p.template, p.numbers) for p in side} for side in (ours, theirs)]
    assert len(keys[0]) == 2000  # nothing twice
    assert not keys[0] & keys[1]
    assert {p.question for p in ours}.isdisjoint(p.question for p in theirs)
    assert {split_of(p) for p in theirs} == {"calibration"}


def test_a_larger_count_extends_a_smaller_one():
    small, large = read_problems("arithmetic", count=10, seed=3), read_problems("arithmetic", count=1000, seed=3)
    assert small == large
    assert len(read_problems("arithmetic", count=1025, seed=3)) == 2048


def test_the_generator_says_when_the_templates_have_no_more(monkeypatch):
    only = Template("tiny", "{a} and {b}?", ("[sum = a + b]",), {"a": (1, 4), "b": (1, 4)})
    monkeypatch.setattr("evals.problems.TEMPLATES", (only,))
    count = sum(split_of(Problem("tiny", (a, b), "", "", 0)) == "eval" for a in range(1, 5) for b in range(1, 5))
    with pytest.raises(InputError, match=f"^there are no more than {count} arithmetic problems of the split 'eval', l"):
        draw(17)


def test_draws_below_cover_the_range():
    class Steps:
        def __init__(self):
            self.values = iter([0.0, 0.34, 0.999999])

        def random(self):
            return next(self.values)

    steps = Steps()
    assert [_below(steps, 3) for _ in range(3)] == [0, 1, 2]


def test_unknown_split():
    with pytest.raises(
        InputError, match=r"split 'train' of the arithmetic problems is unknown, use eval or calibration"
    ):
        draw(1, split="train")


def test_file_columns_and_annotations(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"q": "Two and two?", "a": "2 + 2 = <<2+2=4>>4\\n#### 4"}\n\n', encoding="utf-8")
    rows = read_problems(str(path), columns=("q", "a"))
    assert rows == [("mine/0", "Question: Two and two?\nAnswer:", " 2 + 2 = 4\n#### 4")]


def test_file_without_the_column(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"q": "Two and two?"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"row 0 of '.*mine.jsonl' has no text in the field question, it has q"):
        read_problems(str(path))


def test_misspelt_source():
    with pytest.raises(InputError, match=r"^data source 'arithmetics' is neither .* did you mean 'arithmetic'"):
        read_problems("arithmetics")


def test_gsm8k_from_the_hub(monkeypatch):
    import datasets

    rows = [{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert read_problems("gsm8k") == [("gsm8k/0", "Question: Two and two?\nAnswer:", " 2 + 2 = 4\n#### 4")]
