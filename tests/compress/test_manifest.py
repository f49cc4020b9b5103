"""The list of bytes: what belongs to it, its digest, and every way a directory can depart from it."""

import hashlib
import json
import os

import pytest

from compress.errors import InputError, Refused
from compress.manifest import FileEntry, Manifest, build_manifest, canonical_json, compare


@pytest.fixture
def checkpoint(tmp_path):
    files = {
        "config.json": b"{}",
        "model.safetensors": bytes(range(256)) * 40,
        "sub/tokenizer.json": b"[]",
        "README.md": b"card",
        "sub/README.md": b"not the card",
        "evidence/gate.json": b"{}",
        ".eval_results/x.yaml": b"",
        "model.sig": b"s",
        "sub/model.sigstore": b"s",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def test_manifest_lists_what_ships_sorted_with_size_and_sha256(checkpoint):
    manifest = build_manifest(checkpoint)
    assert [entry.path for entry in manifest.files] == [
        "config.json",
        "model.safetensors",
        "sub/README.md",
        "sub/tokenizer.json",
    ]
    assert manifest.files[0] == FileEntry("config.json", 2, hashlib.sha256(b"{}").hexdigest())
    assert manifest.size == 2 + 10240 + 12 + 2


def test_digest_is_the_sha256_of_the_canonical_list(checkpoint):
    manifest = build_manifest(checkpoint)
    lines = ",".join(
        f'{{"path":"{entry.path}","sha256":"{entry.sha256}","size":{entry.size}}}' for entry in manifest.files
    )
    assert manifest.digest == hashlib.sha256(f"[{lines}]".encode()).hexdigest()


def test_digest_ignores_what_is_excluded_and_nothing_else(checkpoint):
    before = build_manifest(checkpoint).digest
    for name in ("README.md", "evidence/gate.json", ".evidence.old/gate.json", ".evidence.new/gate.json", "model.sig"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(b"other")
    assert build_manifest(checkpoint).digest == before
    (checkpoint / "config.json").write_bytes(b"{ ")
    assert build_manifest(checkpoint).digest != before


def test_record_and_back(checkpoint):
    manifest = build_manifest(checkpoint)
    assert Manifest.from_record(json.loads(json.dumps(manifest.record()))) == manifest


@pytest.mark.parametrize("record", [{}, {"files": [{"path": "x"}]}, {"files": 3}, [], None], ids=str)
def test_a_record_of_something_else_is_refused(record):
    with pytest.raises(Refused, match=r"^the manifest is not a list of path, size and sha256"):
        Manifest.from_record(record)


def test_an_untouched_directory_has_no_differences(checkpoint):
    assert compare(build_manifest(checkpoint), checkpoint) == []


@pytest.mark.parametrize("place", [0, 5000, 10239])
def test_one_flipped_bit_is_a_change(checkpoint, place):
    manifest = build_manifest(checkpoint)
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[place] ^= 1
    (checkpoint / "model.safetensors").write_bytes(content)
    assert [str(found) for found in compare(manifest, checkpoint)] == [
        "model.safetensors has other bytes than those in the manifest"
    ]


def test_missing_extra_and_resized_files_are_named_in_order(checkpoint):
    manifest = build_manifest(checkpoint)
    (checkpoint / "config.json").unlink()
    (checkpoint / "model-00002.safetensors").write_bytes(b"")
    (checkpoint / "sub" / "tokenizer.json").write_bytes(b"[1]")
    assert [str(found) for found in compare(manifest, checkpoint)] == [
        "config.json is in the manifest and not in the directory",
        "model-00002.safetensors is in the directory and not in the manifest",
        "sub/tokenizer.json has other bytes than those in the manifest",
    ]


@pytest.mark.parametrize("name", ["link.safetensors", "evidence/link.json"])
def test_links_are_refused_wherever_they_are(checkpoint, name):
    (checkpoint / name).symlink_to(checkpoint / "config.json")
    with pytest.raises(Refused) as error:
        build_manifest(checkpoint)
    assert str(error.value) == f"{name} in {checkpoint} is a link; a checkpoint holds plain files only"


def test_linked_folders_are_refused(checkpoint, tmp_path_factory):
    (checkpoint / "folder").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(Refused, match=r"folder in .* is a link"):
        build_manifest(checkpoint)


def test_special_files_are_refused(checkpoint):
    os.mkfifo(checkpoint / "pipe")
    with pytest.raises(Refused, match=r"pipe in .* is a special file"):
        build_manifest(checkpoint)


def test_a_folder_that_cannot_be_read_is_no_empty_folder(checkpoint, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        build_manifest(checkpoint)


def test_no_directory_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="nowhere is not a directory"):
        build_manifest(tmp_path / "nowhere")


def test_progress_counts_every_byte(checkpoint):
    seen = []
    manifest = build_manifest(checkpoint, progress=seen.append)
    assert sum(seen) == manifest.size


def test_canonical_json_is_one_string_and_refuses_what_json_cannot_say():
    assert canonical_json({"b": 1, "a": ["é", None]}) == '{"a":["é",null],"b":1}'.encode()
    with pytest.raises(ValueError, match="Out of range float values"):
        canonical_json({"a": float("nan")})
