import re
from collections import Counter

import pytest

from evals.documents import read_documents
from evals.options import Problems
from evals.recall import DEPTHS, depth_of, recall
from evals.samples import load_samples

FACT = re.compile(r"^The access code of the (\w+) is (\d{5})\.$", re.MULTILINE)
QUESTION = re.compile(r"\n\nQuestion: What is the access code of the (\w+)\?\nAnswer: The access code of the (\w+) is$")


def words_before(context, at):
    return len(FACT.sub("", context[:at]).split())


def filler_of(samples):
    """Long paragraphs of the text around the facts."""
    return {part for _, context, _ in samples for part in context.split("\n\n")[:-1] if len(part.split()) > 12}


@pytest.mark.parametrize("words", [300, 1400])
def test_the_fact_asked_for_is_planted_once_at_the_depth_its_id_states(words):
    for name, context, target in recall(count=15, seed=3, split="eval", words=words):
        place = QUESTION.search(context)
        assert place and place[1] == place[2]
        facts = list(FACT.finditer(context))
        assert len(facts) == len({fact[1] for fact in facts}) == len({fact[2] for fact in facts}) == len(DEPTHS)
        total = words_before(context, place.start())
        assert total >= words
        asked = next(fact for fact in facts if fact[1] == place[1])
        assert target == f" {asked[2]}." and context.count(asked[2]) == 1
        paragraph = max(len(part.split()) for part in context.split("\n\n"))
        assert 0 <= words_before(context, asked.start()) - depth_of(name) * total <= paragraph


def test_depths_are_balanced_and_texts_go_on():
    samples = recall(count=20, seed=1, split="eval")
    assert Counter(depth_of(name) for name, _, _ in samples) == dict.fromkeys(DEPTHS, 4)
    assert filler_of(samples[:1]).isdisjoint(filler_of(samples[1:2]))


def test_seed_and_split_change_everything_and_nothing_else_does():
    first = recall(count=5, seed=1, split="eval")
    assert first == recall(count=5, seed=1, split="eval")
    assert {t for _, _, t in first}.isdisjoint(t for _, _, t in recall(count=5, seed=2, split="eval"))
    theirs = recall(count=5, seed=1, split="calibration")
    assert filler_of(first) and filler_of(first).isdisjoint(filler_of(theirs))


def test_other_ids_have_no_depth():
    assert depth_of("arithmetic/eval/3") is None and depth_of("recall") is None


def test_as_a_source_of_problems():
    found = load_samples("recall", kind="problems", source="recall", count=10, seed=1, options={"words": 200})
    assert Counter(depth_of(sample.id) for sample in found.samples) == dict.fromkeys(DEPTHS, 2)
    with pytest.raises(ValueError, match="words is the length of recall's text, leave it out for arithmetic"):
        Problems(source="arithmetic", words=3)


def test_long_documents_are_cut_from_continuous_text(tmp_path):
    found = load_samples("long", kind="documents", source="python-docs", count=20, options={"words": 1300})
    assert min(len(sample.target.split()) for sample in found.samples) >= 1300
    (tmp_path / "book.txt").write_text("\n\n".join([" ".join(["word"] * 200)] * 10), encoding="utf-8")
    lengths = [len(text.split()) for _, text in read_documents(str(tmp_path / "book.txt"), words=1000)]
    assert lengths == [1000, 1000]
