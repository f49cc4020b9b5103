"""Where documents come from: the text every Python carries, WikiText through `datasets`, or a file of one's own.

"python-docs" is `pydoc_data.topics`, the language reference behind `help("types")`: no download, about 44,000 words.
Several topics repeat whole sections of others, so paragraphs are taken once, from the longest topic that has them, and
each topic is cut at blank lines into documents of at least so many words. The text differs between Python versions,
which is why results carry the hash of the samples and no version is pinned here.

Texts are scored as they are: nothing is detokenized, unwrapped or normalized.
"""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import accumulate, groupby
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

from compress.errors import InputError
from compress.inputs import parse_json

WORDS: Final = 350
FIELDS: Final = ("text", "page")

Row = dict[str, Any]


def read_documents(source: str, *, field: str | None = None, words: int = WORDS) -> list[tuple[str, str]]:
    """(id, text) of every document of a named source or a .jsonl, .txt or .parquet file, in its own order.

    `field` is the column of the text; by default "text", else "page". `words` is the least length of the documents that
    continuous text ("python-docs", .txt) is cut into. Raises InputError.
    """
    if source in SOURCES:
        return SOURCES[source](words)
    path = Path(source)
    if path.suffix == ".txt":
        return pieces(path.stem, _read_text(path), words)
    return [(f"{path.stem}/{i}", _column(path, i, row, field)) for i, row in enumerate(read_rows(source, SOURCES))]


def read_rows(source: str, named: dict[str, Any]) -> list[Row]:
    """The rows of a .jsonl or .parquet file; InputError otherwise, with the nearest of `named` if none was meant."""
    path = Path(source)
    if path.suffix not in FILES:
        near = get_close_matches(source, named, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"use one of {', '.join(named)} or a path ending in .jsonl or .parquet (.txt for documents)"
        )
        raise InputError(f"data source {source!r} is neither known nor a file of a known kind, {hint}")
    if not path.is_file():
        raise InputError(f"data file {source!r} does not exist")
    return list(FILES[path.suffix](path))


def pieces(name: str, text: str, words: int = WORDS) -> list[tuple[str, str]]:
    """Cut at blank lines into (id, text) of at least `words` words; a shorter rest joins the last, or stands alone."""
    paragraphs = [part.rstrip() for part in text.split("\n\n") if part.strip()]
    if not paragraphs:
        return []
    cut: list[list[str]] = [[]]
    for paragraph in paragraphs:
        if _words(cut[-1]) >= words:
            cut.append([])
        cut[-1].append(paragraph)
    if len(cut) > 1 and _words(cut[-1]) < words:
        cut[-2:] = [cut[-2] + cut[-1]]
    return [(f"{name}/{i}", "\n\n".join(part)) for i, part in enumerate(cut)]


def _words(paragraphs: list[str]) -> int:
    return sum(len(paragraph.split()) for paragraph in paragraphs)


def _python_docs(words: int) -> list[tuple[str, str]]:
    seen: set[str] = set()
    documents = []
    for name in sorted(topics, key=lambda key: (-len(topics[key]), key)):
        fresh = {" ".join(part.split()): part for part in topics[name].split("\n\n")}
        text = "\n\n".join(part for key, part in fresh.items() if key not in seen)
        seen.update(fresh)
        documents += pieces(name, text, words)
    return [(name, text) for name, text in documents if len(text.split()) >= words]


def _wikitext(_: int) -> list[tuple[str, str]]:
    """Articles of WikiText-2 (raw, test): a heading of level one opens the next."""
    lines = [row["text"] for row in hub_rows("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    numbers = accumulate(line.startswith(" = ") and not line.startswith(" = =") for line in lines)
    articles = groupby(zip(numbers, lines, strict=True), key=lambda pair: pair[0])
    return [(f"wikitext/{int(i)}", "".join(line for _, line in article)) for i, article in articles]


def hub_rows(path: str, name: str, split: str) -> Iterator[Row]:
    """Rows of a data set on the hub; InputError if it cannot be had."""
    import datasets  # a second to import, and only these sources need it

    try:
        yield from datasets.load_dataset(path, name, split=split)
    except OSError as error:
        raise InputError(
            f"cannot get the data set {path} from the hub ({error}), give the path of a .jsonl file instead"
        ) from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the data file {str(path)!r}: {error}") from error


def _jsonl(path: Path) -> Iterator[Row]:
    # Not splitlines(): it also cuts at U+2028 and others, which JSON strings may hold as they are.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise InputError(f"line {number} of {str(path)!r} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"line {number} of {str(path)!r} is not a JSON object")
        yield row


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet  # type: ignore[import-untyped]
    from pyarrow.lib import ArrowInvalid  # type: ignore[import-untyped]

    try:
        yield from pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ArrowInvalid) as error:
        raise InputError(f"cannot read the data file {str(path)!r}: {error}") from error


def _column(path: Path, index: int, row: Row, field: str | None) -> str:
    wanted = (field,) if field else FIELDS
    return string_field(path, index, row, wanted)


def string_field(path: Path, index: int, row: Row, names: tuple[str, ...]) -> str:
    """The first of the named fields a row has, which must be text."""
    value = next((row[name] for name in names if name in row), None)
    if not isinstance(value, str):
        raise InputError(
            f"row {index} of {str(path)!r} has no text in the field {' or '.join(names)}, "
            f"it has {', '.join(sorted(row)) or 'no fields'}"
        )
    return value


SOURCES: Final[dict[str, Callable[[int], list[tuple[str, str]]]]] = {"python-docs": _python_docs, "wikitext": _wikitext}
FILES: Final[dict[str, Callable[[Path], Iterator[Row]]]] = {".jsonl": _jsonl, ".parquet": _parquet}
