"""The in-toto statement and its signature: what it says, and that no edit and no other key gets by."""

import base64
import json
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from compress.errors import InputError, Refused
from compress.manifest import sha256_file
from compress.statement import sign_statement
from compress.verify import show, verify

KINDS = {
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "rsa": lambda: rsa.generate_private_key(65537, 2048),
}


@pytest.fixture
def keys(tmp_path):
    """Write a pair of keys: paths of the private and the public one."""

    def make(kind="ed25519", name="key", encryption=None):
        key = KINDS[kind]()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()))
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        return private, public

    return make


def read(directory, name="test-result.intoto.json"):
    return json.loads((directory / "evidence" / name).read_text())


def edit(directory, name, change):
    found = read(directory, name)
    change(found)
    (directory / "evidence" / name).write_text(json.dumps(found))


def test_the_statement_is_about_every_file_and_names_the_evidence(make_run):
    directory, _ = make_run()
    found = read(directory)
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert found["subject"] == [
        {"name": name, "digest": {"sha256": sha256_file(directory / name)}}
        for name in ("config.json", "model.safetensors")
    ]
    assert found["predicate"] == {
        "result": "PASSED",
        "configuration": [
            {"name": f"evidence/{name}", "digest": {"sha256": sha256_file(directory / "evidence" / name)}}
            for name in ("recipe.lock.yaml", "gate.json", "SHA256SUMS")
        ],
        "passedTests": ["text", "math", "kl", "task"],
        "warnedTests": [],
        "failedTests": [],
    }
    assert found["predicate"]["configuration"][2]["digest"]["sha256"] == verify(directory).seal


def test_a_blocked_run_fails_and_what_is_not_required_warns(make_run):
    directory, gate = make_run(0.3)
    found, verdicts = read(directory)["predicate"], {m["id"]: m["verdict"] for m in gate["metrics"]}
    assert found["result"] == "FAILED"
    assert set(found["failedTests"]) == {m for m, verdict in verdicts.items() if verdict != "PASS" and m != "kl"}
    assert set(found["passedTests"]) == {m for m, verdict in verdicts.items() if verdict == "PASS"}


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["predicate"].update(result="WARNED"),
        lambda s: s["subject"].pop(),
        lambda s: s["subject"][0]["digest"].update(sha256="0" * 64),
        lambda s: s["predicate"]["configuration"].pop(),
    ],
    ids=["result", "subject", "digest", "configuration"],
)
def test_an_edited_statement_is_noticed(make_run, change):
    directory, _ = make_run()
    edit(directory, "test-result.intoto.json", change)
    report = verify(directory)
    assert report.problems == ("test-result.intoto.json does not say what gate.json and manifest.json say",)
    assert report.exit_code == 5


@pytest.mark.parametrize("kind", ["ed25519", "p256"])
def test_a_signature_verifies_with_its_key_and_leaves_the_evidence_as_it_was(make_run, keys, kind):
    directory, _ = make_run()
    private, public = keys(kind)
    before = verify(directory)
    assert sign_statement(directory, private) == directory / "evidence" / "test-result.dsse.json"
    assert verify(directory) == verify(directory, public_key=public) == before
    assert show(directory, public_key=public) == 0


def test_the_envelope_is_dsse(make_run, keys, tmp_path):
    directory, _ = make_run()
    private, public = keys()
    sign_statement(directory, private)
    envelope = read(directory, "test-result.dsse.json")
    payload = base64.b64decode(envelope["payload"])
    assert json.loads(payload) == read(directory)
    kind = b"application/vnd.in-toto+json"
    (tmp_path / "signed").write_bytes(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload))
    (tmp_path / "signature").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin", "-in", "signed"]
    subprocess.run([*command, "-sigfile", "signature"], cwd=tmp_path, check=True, capture_output=True)


def test_another_key_no_signature_and_another_statement_are_noticed(make_run, keys):
    directory, _ = make_run()
    private, public = keys()
    _, other = keys(name="other")
    missing = verify(directory, public_key=public)
    assert missing.problems == ("test-result.dsse.json is missing: nobody has signed this evidence",)
    sign_statement(directory, private)
    wrong = verify(directory, public_key=other)
    assert wrong.problems == (f"test-result.dsse.json was not signed with the key in {other}",)
    edit(directory, "test-result.dsse.json", lambda e: e.update(payload=base64.b64encode(b"{}").decode()))
    found = verify(directory, public_key=public)
    assert found.problems == ("test-result.dsse.json signs another statement than test-result.intoto.json",)
    assert (missing.exit_code, wrong.exit_code, found.exit_code) == (5, 5, 5)


def test_rewriting_everything_is_noticed_with_a_key(make_run, write_run, keys, tmp_path):
    """The one forgery that hashes alone cannot show: all of it made anew, with better rows."""
    directory, _ = make_run(0.2)
    private, public = keys()
    sign_statement(directory, private)
    write_run(tmp_path / "forged", 0.005)
    envelope = (directory / "evidence" / "test-result.dsse.json").read_bytes()
    (tmp_path / "forged" / "evidence" / "test-result.dsse.json").write_bytes(envelope)
    assert verify(tmp_path / "forged").problems == ()
    assert len(verify(tmp_path / "forged", public_key=public).problems) == 1


def test_an_envelope_that_is_none_is_refused(make_run, keys):
    directory, _ = make_run()
    _, public = keys()
    (directory / "evidence" / "test-result.dsse.json").write_text("{}")
    with pytest.raises(Refused, match=r"^test-result\.dsse\.json is no DSSE envelope: "):
        verify(directory, public_key=public)


@pytest.mark.parametrize("kind", ["p384", "rsa"])
def test_keys_of_another_kind_are_refused(make_run, keys, kind):
    directory, _ = make_run()
    private, public = keys(kind)
    for act in (lambda: sign_statement(directory, private), lambda: verify(directory, public_key=public)):
        with pytest.raises(InputError, match="is a key of another kind: give Ed25519, or ECDSA on P-256"):
            act()


def test_keys_that_cannot_be_read_are_refused(make_run, keys, tmp_path):
    directory, _ = make_run()
    private, public = keys()
    with pytest.raises(InputError, match=r"the private key .*none\.pem cannot be read: No such file or directory"):
        sign_statement(directory, tmp_path / "none.pem")
    with pytest.raises(InputError, match="is no private key in PEM form"):
        sign_statement(directory, public)
    with pytest.raises(InputError, match="is no public key in PEM form"):
        verify(directory, public_key=private)


def test_an_encrypted_key_takes_its_password_from_the_environment(make_run, keys, monkeypatch):
    directory, _ = make_run()
    private, public = keys(encryption=BestAvailableEncryption(b"secret"))
    with pytest.raises(InputError, match="its password in COMPRESS_KEY_PASSWORD is missing or wrong"):
        sign_statement(directory, private)
    monkeypatch.setenv("COMPRESS_KEY_PASSWORD", "secret")
    sign_statement(directory, private)
    assert verify(directory, public_key=public).problems == ()


def test_a_directory_without_a_statement_cannot_be_signed(keys, tmp_path):
    private, _ = keys()
    with pytest.raises(InputError, match=r"holds no evidence/test-result\.intoto\.json"):
        sign_statement(tmp_path, private)
