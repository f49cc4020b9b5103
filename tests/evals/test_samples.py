import hashlib
import json

import pytest

from compress.errors import InputError, Refused
from evals.documents import WORDS, pieces, read_documents
from evals.samples import load_samples


def lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_python_docs_are_many_long_documents_that_share_no_paragraph():
    found = load_samples("text", kind="documents", source="python-docs", seed=1)
    assert len(found.samples) >= 60
    assert all(sample.context == "" and len(sample.target.split()) >= WORDS for sample in found.samples)
    paragraphs = [" ".join(p.split()) for sample in found.samples for p in sample.target.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))


def test_order_is_that_of_the_seeded_hash_and_prefixes_agree(tmp_path):
    source = lines(tmp_path / "mine.jsonl", [{"text": f"document {i}"} for i in range(30)])
    found = load_samples("text", kind="documents", source=source, seed=7)
    ids = sorted((f"mine/{i}" for i in range(30)), key=lambda name: hashlib.sha256(f"7:{name}".encode()).hexdigest())
    assert [sample.id for sample in found.samples] == ids
    fewer = load_samples("text", kind="documents", source=source, count=11, seed=7)
    assert fewer.samples == found.samples[:11]
    assert fewer.sha256 != found.sha256
    other = load_samples("text", kind="documents", source=source, seed=8)
    assert other.samples != found.samples and set(other.samples) == set(found.samples)


def test_a_set_of_all_there_is_says_so():
    assert load_samples("math", kind="problems", source="arithmetic").whole
    assert not load_samples("math", kind="problems", source="arithmetic", count=20).whole


def test_digest_is_that_of_the_canonical_json(tmp_path):
    source = lines(tmp_path / "mine.jsonl", [{"text": "zwölf"}])
    found = load_samples("text", kind="documents", source=source)
    canonical = '[{"context":"","id":"mine/0","target":"zwölf"}]'
    assert found.sha256 == hashlib.sha256(canonical.encode()).hexdigest()


def test_problems_have_a_context():
    found = load_samples("math", kind="problems", source="arithmetic", count=5, seed=1)
    assert len(found.samples) == 5
    assert all(s.context.startswith("Question: ") and s.context.endswith("\nAnswer:") for s in found.samples)
    assert all(s.target.startswith(" ") and s.target.endswith(".") for s in found.samples)


def test_too_few_samples(tmp_path):
    source = lines(tmp_path / "mine.jsonl", [{"text": "one"}, {"text": " "}])
    with pytest.raises(
        InputError, match=r"^'text' asks for 2 documents but '.*' holds only 1, lower count or give more$"
    ):
        load_samples("text", kind="documents", source=source, count=2)


@pytest.mark.parametrize("rows", [[], [{"text": " \n"}]], ids=["no-rows", "only-spaces"])
def test_no_text_at_all(tmp_path, rows):
    source = lines(tmp_path / "mine.jsonl", rows)
    with pytest.raises(Refused, match=r"^the documents source '.*' of 'text' holds no text, so nothing can be"):
        load_samples("text", kind="documents", source=source)


def test_count_below_one():
    with pytest.raises(InputError, match=r"^count of the sample set 'text' is 0, it must be at least 1$"):
        load_samples("text", kind="documents", source="python-docs", count=0)


def test_text_or_else_page_or_the_given_field(tmp_path):
    source = lines(tmp_path / "mine.jsonl", [{"text": "A", "page": "B"}, {"page": "C", "body": "D"}])
    assert read_documents(source) == [("mine/0", "A"), ("mine/1", "C")]
    assert read_documents(lines(tmp_path / "b.jsonl", [{"text": "A", "body": "D"}]), field="body") == [("b/0", "D")]
    with pytest.raises(InputError, match=r"row 0 of '.*' has no text in the field body, it has page, text$"):
        read_documents(source, field="body")


def test_a_field_that_is_not_text(tmp_path):
    with pytest.raises(InputError, match=r"row 0 of '.*' has no text in the field text or page, it has text$"):
        read_documents(lines(tmp_path / "mine.jsonl", [{"text": 3}]))


def test_unusual_line_separators_are_text(tmp_path):
    source = lines(tmp_path / "mine.jsonl", [{"text": "one\u2028two\x85three"}])
    assert read_documents(source) == [("mine/0", "one\u2028two\x85three")]


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "mine.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["A", "B"]}), path)
    assert read_documents(str(path)) == [("mine/0", "A"), ("mine/1", "B")]
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"^cannot read the data file '.*mine.parquet': "):
        read_documents(str(path))


def test_text_files_are_cut_at_blank_lines(tmp_path):
    paragraph = " ".join(["word"] * 200)
    (tmp_path / "book.txt").write_text("\n\n".join([paragraph] * 5), encoding="utf-8")
    found = read_documents(str(tmp_path / "book.txt"))
    assert [(name, len(text.split())) for name, text in found] == [("book/0", 400), ("book/1", 600)]
    assert pieces("short", "few words") == [("short/0", "few words")]
    assert pieces("empty", " \n\n ") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"text": \n', "^line 2 of '.*' is not JSON: "),
        ('["a"]\n', "^line 1 of '.*' is not a JSON object$"),
    ],
    ids=["cut-off", "list"],
)
def test_broken_json_lines(tmp_path, text, message):
    (tmp_path / "mine.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_documents(str(tmp_path / "mine.jsonl"))


def test_not_utf8(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"^cannot read the data file '.*mine.jsonl': 'utf-8' codec"):
        read_documents(str(tmp_path / "mine.jsonl"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("python-doc", r"did you mean 'python-docs'[?]$"),
        ("c4", r"use one of python-docs, wikitext or a path ending in .jsonl or .parquet \(.txt for documents\)$"),
        ("missing.jsonl", r"^data file 'missing.jsonl' does not exist$"),
        ("missing.txt", r"^cannot read the data file 'missing.txt': "),
    ],
)
def test_sources_that_are_not_there(source, message):
    with pytest.raises(InputError, match=message):
        read_documents(source)


def test_hub_out_of_reach(monkeypatch):
    import datasets

    def refuse(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        InputError, match=r"^cannot get the data set Salesforce/wikitext from the hub \(offline\), give"
    ):
        read_documents("wikitext")


def test_wikitext_is_split_at_headings_of_level_one(monkeypatch):
    import datasets

    text = ["", " = One = \n", " = = Part = = \n", " a \n", " = Two = \n", " b \n"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": line} for line in text])
    found = load_samples("text", kind="documents", source="wikitext")
    assert {sample.id: sample.target for sample in found.samples} == {
        "wikitext/1": " = One = \n = = Part = = \n a \n",
        "wikitext/2": " = Two = \n b \n",
    }
