"""Publishing on the Hugging Face hub so that a branch moves from one whole set of files to another, or not at all.

The files are sent to a place of their own: a staging branch, or the branch of a pull request. There the hub's own
hashes (sha256 of large files, git's blob ids of small ones) are compared with those of the manifest. Only then does
the target move, in a single commit made of copies of what was compared, on condition that nobody else moved it. So
a damaged upload, a lost connection or a second push leaves the old revision as it was.

Every step may be repeated: what the hub has already is not sent again.
"""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    get_token,
    is_offline_mode,
)
from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from compress.errors import InputError, PushFailed
from compress.hub_errors import explained, patiently
from compress.manifest import FileEntry
from compress.progress import console
from compress.push_options import MAIN, PushOptions

__all__ = ["CARD", "Parcel", "Pushed", "check_login", "deliver", "hub", "read_card"]

CARD = "README.md"
Change = CommitOperationAdd | CommitOperationCopy | CommitOperationDelete
KEPT: Final = frozenset({".gitattributes"})  # the hub's own file: which suffixes are stored as large files


@dataclass(frozen=True)
class Parcel:
    """What is published: a directory, the files of it with their hashes, the card's text, and a name for the whole."""

    directory: Path
    files: tuple[FileEntry, ...]
    card: str
    digest: str

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(entry.size for entry in self.files)


@dataclass(frozen=True)
class Pushed:
    """Where it is now. `pull_request` is the address of one that was opened, None if the branch itself moved."""

    repo: str
    revision: str
    commit: str
    url: str
    pull_request: str | None


def hub() -> HfApi:
    """The hub of HF_ENDPOINT with the login of HF_TOKEN or `hf auth login`; its bars are drawn on a terminal only."""
    if not console.is_terminal:
        disable_progress_bars()
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="compress")


def check_login(options: PushOptions) -> None:
    """Refuse before the work what would stop the push after it, without asking the hub.

    Raises:
        InputError: no login, or the hub may not be asked.
    """
    if get_token() is None:
        raise InputError(f"push.repo is {options.repo} and there is no login: set HF_TOKEN or run `hf auth login`")
    if is_offline_mode():
        raise InputError(f"push.repo is {options.repo} and HF_HUB_OFFLINE is set: unset it, or leave out push")


def read_card(api: HfApi, options: PushOptions) -> str | None:
    """The card that the target has now, None without one.

    Raises:
        PushFailed: the hub cannot be asked.
    """
    with explained(options.repo), tempfile.TemporaryDirectory() as folder:
        if not patiently(lambda: api.repo_exists(options.repo)):
            return None
        try:
            path = api.hf_hub_download(options.repo, CARD, revision=options.revision, local_dir=folder)
        except (RemoteEntryNotFoundError, RevisionNotFoundError):
            return None
        return Path(path).read_text(encoding="utf-8")


def deliver(api: HfApi, parcel: Parcel, options: PushOptions) -> Pushed:
    """Publish `parcel`.

    Raises:
        PushFailed: it could not be sent, or the hub holds other bytes than the manifest says.
    """
    with explained(options.repo):
        patiently(lambda: _prepare(api, options))
        if options.create_pr:
            return _to_pull_request(api, parcel, options)
        return patiently(lambda: _to_branch(api, parcel, options))


def _prepare(api: HfApi, options: PushOptions) -> None:
    """The repository and the branch exist afterwards; new ones are private unless said otherwise."""
    api.create_repo(options.repo, private=options.private is not False, exist_ok=True)
    if options.private is not None and api.repo_info(options.repo).private is not options.private:
        now, wanted = ("public", "private") if options.private else ("private", "public")
        raise PushFailed(f"{options.repo} exists and is {now}: make it {wanted} in its settings, or leave out private")
    if options.revision != MAIN:
        api.create_branch(options.repo, branch=options.revision, exist_ok=True)


def _to_branch(api: HfApi, parcel: Parcel, options: PushOptions) -> Pushed:
    """Stage, compare, and move the branch in one commit."""
    repo, target = options.repo, options.revision
    head = str(api.repo_info(repo, revision=target).sha)
    if not _differences(api, repo, head, parcel):
        return Pushed(repo, target, head, f"{api.endpoint}/{repo}/tree/{target}", None)
    stage = f"compress-staging-{parcel.digest[:16]}"
    api.create_branch(repo, branch=stage, revision=head, exist_ok=True)
    staged = _send(api, parcel, repo, stage)
    try:
        _compare(api, repo, staged, parcel)
        copies = [CommitOperationCopy(path, path, src_revision=staged) for path in _expected(parcel)]
        changes: list[Change] = [*copies, *_deletions(api, repo, head, parcel)]
        moved = api.create_commit(
            repo, changes, commit_message=_message(parcel), revision=target, parent_commit=head
        ).oid
    finally:
        api.delete_branch(repo, branch=stage)
    _compare(api, repo, moved, parcel, before=head)
    return Pushed(repo, target, moved, f"{api.endpoint}/{repo}/tree/{target}", None)


def _to_pull_request(api: HfApi, parcel: Parcel, options: PushOptions) -> Pushed:
    """Send to the branch of a pull request, an open one of the same content if there is one, and compare there."""
    repo, title = options.repo, _message(parcel)
    found = [pr for pr in api.get_repo_discussions(repo, discussion_type="pull_request") if pr.title == title]
    opened = [pr for pr in found if pr.status in ("open", "draft")]
    request = opened[0] if opened else api.create_pull_request(repo, title)
    reference = str(request.git_reference)
    staged = patiently(lambda: _send(api, parcel, repo, reference))
    try:
        _compare(api, repo, staged, parcel)
    except PushFailed:
        api.change_discussion_status(
            repo, request.num, "closed", comment="The uploaded bytes differ from the manifest."
        )
        raise
    return Pushed(repo, reference, staged, request.url, request.url)


def _send(api: HfApi, parcel: Parcel, repo: str, revision: str) -> str:
    """Make `revision` hold the parcel and nothing else; the commit. The library hashes what it sends."""
    additions = [CommitOperationAdd(entry.path, parcel.directory / entry.path) for entry in parcel.files]
    additions.append(CommitOperationAdd(CARD, parcel.card.encode()))
    changes: list[Change] = [*additions, *_deletions(api, repo, revision, parcel)]
    return str(api.create_commit(repo, changes, commit_message=_message(parcel), revision=revision).oid)


def _message(parcel: Parcel) -> str:
    return f"Publish the checkpoint {parcel.digest[:16]}"


def _deletions(api: HfApi, repo: str, revision: str, parcel: Parcel) -> list[CommitOperationDelete]:
    extra = _listing(api, repo, revision).keys() - _expected(parcel)
    return [CommitOperationDelete(path) for path in sorted(extra)]


def _listing(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo, revision=revision, recursive=True)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile) and entry.path not in KEPT}


def _expected(parcel: Parcel) -> set[str]:
    return {CARD, *(entry.path for entry in parcel.files)}


def _compare(api: HfApi, repo: str, revision: str, parcel: Parcel, *, before: str | None = None) -> None:
    """Raise PushFailed unless the hub holds, at `revision`, the very bytes of the parcel."""
    found = _differences(api, repo, revision, parcel)
    if found:
        restore = f"; the revision before is {before}" if before else "; the old revision was left as it was"
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise PushFailed(f"{repo}: {found[0]}{more}{restore}")


def _differences(api: HfApi, repo: str, revision: str, parcel: Parcel) -> list[str]:
    """A sentence for each file that the hub does not hold as the manifest says."""
    listing = _listing(api, repo, revision)
    wrong = [f"{path} is on the hub and not in the manifest" for path in listing.keys() - _expected(parcel)]
    card = parcel.card.encode()
    entries: Mapping[str, tuple[int, str]] = {
        **{entry.path: (entry.size, entry.sha256) for entry in parcel.files},
        CARD: (len(card), hashlib.sha256(card).hexdigest()),
    }
    for path, (size, sha256) in entries.items():
        if path not in listing:
            wrong.append(f"{path} did not arrive on the hub")
        elif not _same(listing[path], size, sha256, card if path == CARD else parcel.directory / path):
            wrong.append(f"the hub holds other bytes of {path} than those in the manifest")
    return sorted(wrong)


def _same(remote: RepoFile, size: int, sha256: str, local: Path | bytes) -> bool:
    """By sha256 where the hub has one; a small file by git's blob id, of local bytes that have that sha256."""
    if remote.size != size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == sha256)
    content = local.read_bytes() if isinstance(local, Path) else local
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return hashlib.sha256(content).hexdigest() == sha256 and remote.blob_id == blob
