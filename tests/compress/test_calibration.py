"""Calibration sees nothing that is evaluated, however the evaluation has cut it."""

import pytest

from compress.calibration import calibration_texts
from compress.errors import InputError
from evals.samples import load_samples


def paragraphs(text):
    return {" ".join(part.split()) for part in text.split("\n\n")}


def test_no_paragraph_is_shared_with_what_is_evaluated():
    sets = [
        load_samples("long", kind="documents", source="python-docs", count=20, seed=1, options={"words": 1300}),
        load_samples("recall", kind="problems", source="recall", count=20, seed=1),
        load_samples("math", kind="problems", source="arithmetic", count=40, seed=1),
    ]
    texts = [*calibration_texts("python-docs", "arithmetic", sets)]
    samples = [sample for found in sets for sample in found.samples]
    evaluated = {part for sample in samples for part in paragraphs(f"{sample.context}\n\n{sample.target}")}
    documents = [text for text in texts if not text.startswith("Question: ")]
    assert len(documents) >= 10 and len(texts) > len(documents) + 100
    assert all(evaluated.isdisjoint(paragraphs(text)) for text in texts)


def test_nothing_is_left():
    everything = load_samples("text", kind="documents", source="python-docs")
    with pytest.raises(
        InputError, match=r"^no calibration text is left: name documents or problems that the evaluation"
    ):
        calibration_texts("python-docs", None, [everything])
