"""Texts to calibrate with, none of which is measured.

Half are documents, half worked problems, so that both prose and figures are seen. No paragraph of a document occurs in
any sample of the evaluation, wherever that was cut, and the problems are of the split that is never evaluated.
"""

from collections.abc import Sequence

from evals.documents import read_documents
from evals.recall import split_of_document
from evals.samples import Sample, SampleSet, load_samples, permuted

__all__ = ["calibration_texts"]


def calibration_texts(measured: Sequence[SampleSet], *, count: int, seed: int) -> list[str]:
    """`count` texts; more of them are problems where too few documents are left."""
    taken = {key for found in measured for s in found.samples for key in _keys(f"{s.context}\n\n{s.target}")}
    left = [
        Sample(name, "", text)
        for name, text in read_documents("python-docs")
        if split_of_document(name) == "calibration" and not taken.intersection(_keys(text))
    ]
    documents = permuted(left, seed=seed)[: count // 2]
    options = {"split": "calibration"}
    problems = load_samples(
        "calibration", kind="problems", source="arithmetic", count=count - len(documents), seed=seed, options=options
    )
    return [sample.context + sample.target for sample in (*documents, *problems.samples)]


def _keys(text: str) -> set[str]:
    """Its paragraphs, whatever their line breaks."""
    return {" ".join(paragraph.split()) for paragraph in text.split("\n\n")} - {""}
