"""The bytes of a checkpoint directory as a sorted list of (path, size, sha256), and one digest over the list.

Everything in the directory belongs to it but a short fixed list: the card, the evidence about these very bytes,
signatures over them, and what the hub's client adds to a copy, which no engine reads. Links are refused, since they
point at bytes that may change unseen. Files are hashed as a stream; nothing is parsed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from compress.errors import InputError, Refused

__all__ = [
    "EVIDENCE",
    "STAGED",
    "Difference",
    "FileEntry",
    "Manifest",
    "build_manifest",
    "canonical_json",
    "compare",
    "sha256_file",
]

EVIDENCE = "evidence"
STAGED, OLD = f".{EVIDENCE}.new", f".{EVIDENCE}.old"  # while it is replaced
EXCLUDED_PATHS = frozenset({"README.md", ".gitattributes"})
EXCLUDED_FOLDERS = (EVIDENCE, STAGED, OLD, ".eval_results", ".cache/huggingface")
EXCLUDED_SUFFIXES = (".sig", ".sigstore")
CHUNK = 1 << 22  # bytes

Progress = Callable[[int], None]


def canonical_json(value: Any) -> bytes:
    """One byte string per value: sorted keys, no blanks, UTF-8. Of strings and integers it is that of RFC 8785.

    Raises ValueError for NaN and infinity.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


@dataclass(frozen=True, order=True)
class FileEntry:
    """One file: POSIX path below the directory, size in bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a directory, sorted by path."""

    files: tuple[FileEntry, ...]

    @cached_property
    def digest(self) -> str:
        """sha256 over the canonical JSON of the list of files."""
        return hashlib.sha256(canonical_json(self.record()["files"])).hexdigest()

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(entry.size for entry in self.files)

    def record(self) -> dict[str, Any]:
        """Plain data for manifest.json."""
        return {"schema_version": 1, "files": [asdict(entry) for entry in self.files]}

    @classmethod
    def from_record(cls, record: Any) -> "Manifest":
        """The inverse of `record`; `Refused` if it is not one."""
        try:
            files = tuple(FileEntry(**entry) for entry in record["files"])
        except (KeyError, TypeError) as error:
            raise Refused(f"the manifest is not a list of path, size and sha256: {error}") from error
        return cls(files)


@dataclass(frozen=True)
class Difference:
    """How a file of a directory departs from the manifest: `kind` is missing, extra or changed."""

    path: str
    kind: str

    def __str__(self) -> str:
        return f"{self.path} {SENTENCES[self.kind]}"


SENTENCES = {
    "missing": "is in the manifest and not in the directory",
    "extra": "is in the directory and not in the manifest",
    "changed": "has other bytes than those in the manifest",
}


def build_manifest(directory: Path, *, links: bool = False, progress: Progress | None = None) -> Manifest:
    """Hash every file of `directory`; `progress` is told the bytes read since its last call.

    `links` follows links to files, which the hub's cache is made of: for sources, which are only read.

    Raises `InputError` if there is no such directory and `Refused` for links and special files.
    """
    entries = (_entry(directory, path, progress) for path in _files(directory, links=links))
    return Manifest(tuple(sorted(entries)))


def compare(manifest: Manifest, directory: Path, *, progress: Progress | None = None) -> list[Difference]:
    """Every departure of `directory` from the manifest, sorted by path; files of another size are not hashed."""
    listed = {entry.path: entry for entry in manifest.files}
    found = {path.relative_to(directory).as_posix(): path for path in _files(directory)}
    differences = [Difference(path, "missing") for path in listed.keys() - found.keys()]
    differences += [Difference(path, "extra") for path in found.keys() - listed.keys()]
    for path in listed.keys() & found.keys():
        entry, file = listed[path], found[path]
        if file.stat().st_size != entry.size or sha256_file(file, progress=progress) != entry.sha256:
            differences.append(Difference(path, "changed"))
    return sorted(differences, key=lambda difference: difference.path)


def sha256_file(path: Path, *, progress: Progress | None = None) -> str:
    """sha256 of a file in hex, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def _entry(directory: Path, path: Path, progress: Progress | None) -> FileEntry:
    return FileEntry(path.relative_to(directory).as_posix(), path.stat().st_size, sha256_file(path, progress=progress))


def _files(directory: Path, *, links: bool = False) -> Iterator[Path]:
    """The regular files that belong to the checkpoint; what is excluded is still searched for links."""
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory")
    for root, folders, names in os.walk(directory, onerror=_unreadable):
        for path in (Path(root, name) for name in (*folders, *names)):
            mode = (path.stat() if links and path.is_file() else path.lstat()).st_mode
            name = path.relative_to(directory).as_posix()
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                kind = "a link" if stat.S_ISLNK(mode) else "a special file"
                raise Refused(f"{name} in {directory} is {kind}; a checkpoint holds plain files only")
            if stat.S_ISREG(mode) and not _excluded(PurePosixPath(name)):
                yield path


def _unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error


def _excluded(path: PurePosixPath) -> bool:
    return (
        str(path) in EXCLUDED_PATHS
        or any(PurePosixPath(folder) in path.parents for folder in EXCLUDED_FOLDERS)
        or path.name.endswith(EXCLUDED_SUFFIXES)
    )
