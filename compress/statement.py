"""The verdict as an in-toto statement about the checkpoint's files, and a signature over it.

The statement (in-toto Statement v1, predicate test-result v0.1) has every file of the manifest as a subject and names
the evidence by its hashes, the seal among them. It follows from gate.json, so `verify` can tell whether it was edited.
The signature is a DSSE envelope of the statement, made offline with a key of one's own (Ed25519, or ECDSA on P-256);
who has the public key can tell whether all files were rewritten to agree with each other. Keyless signing through a
transparency log is left to sigstore's own tools, which read the same files.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from compress.errors import InputError, Refused
from compress.evidence_files import GATE, LOCK, SUMS
from compress.inputs import parse_json
from compress.keys import private_key, public_key
from compress.manifest import EVIDENCE, Manifest, sha256_file

__all__ = ["ENVELOPE", "STATEMENT", "check_signature", "sign_statement", "statement", "write_statement"]

STATEMENT = "test-result.intoto.json"
ENVELOPE = "test-result.dsse.json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
RESULTS: Final = {"PASS": "PASSED", "WAIVED": "WARNED"}  # everything else FAILED


def statement(directory: Path, gate: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """What is claimed, about which bytes, and where the evidence for it is."""
    folder = directory / EVIDENCE
    evidence = [(name, sha256_file(folder / name)) for name in (LOCK, GATE, SUMS)]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": entry.path, "digest": {"sha256": entry.sha256}} for entry in manifest.files],
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": RESULTS.get(gate["verdict"], "FAILED"),
            "configuration": [{"name": f"{EVIDENCE}/{name}", "digest": {"sha256": value}} for name, value in evidence],
            **_tests(gate),
        },
    }


def _tests(gate: Mapping[str, Any]) -> dict[str, list[str]]:
    """Metrics by how they ended; one that is waived or not required warns instead of failing."""
    waived = {waiver["metric"] for waiver in gate.get("waivers", ())}
    found: dict[str, list[str]] = {"passedTests": [], "warnedTests": [], "failedTests": []}
    for metric in gate["metrics"]:
        warns = metric["id"] in waived or not metric.get("required")
        kind = "passedTests" if metric.get("verdict") == "PASS" else "warnedTests" if warns else "failedTests"
        found[kind].append(metric["id"])
    return found


def write_statement(directory: Path, gate: Mapping[str, Any], manifest: Manifest) -> None:
    """Write evidence/test-result.intoto.json; the rest of the evidence must be there."""
    text = json.dumps(statement(directory, gate, manifest), indent=2, ensure_ascii=False) + "\n"
    (directory / EVIDENCE / STATEMENT).write_text(text, encoding="utf-8", newline="\n")


def sign_statement(directory: Path, key_file: Path) -> Path:
    """Sign the statement of `directory` with a private key in PEM form; returns the envelope's path.

    Raises:
        InputError: no statement, no key, or a key of another kind.
    """
    payload = _read_statement(directory)
    key = private_key(key_file)
    signature = {"keyid": _key_id(key.public_key()), "sig": _encode(key.sign(_encoding(payload), *_scheme(key)))}
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": _encode(payload), "signatures": [signature]}
    target = directory / EVIDENCE / ENVELOPE
    target.write_text(json.dumps(envelope, indent=2) + "\n", encoding="utf-8")
    return target


def check_signature(directory: Path, key_file: Path) -> str | None:
    """None if the key signed the statement that is there, else a sentence.

    Raises:
        InputError: the key cannot be read.
    """
    key = public_key(key_file)
    path = directory / EVIDENCE / ENVELOPE
    if not path.is_file():
        return f"{ENVELOPE} is missing: nobody has signed this evidence"
    try:
        envelope = parse_json(path.read_bytes())
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(found["sig"], validate=True) for found in envelope["signatures"]]
        signed = envelope["payloadType"] == PAYLOAD_TYPE
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{ENVELOPE} is no DSSE envelope: {error}") from error
    if not signed or payload != _read_statement(directory):
        return f"{ENVELOPE} signs another statement than {STATEMENT}"
    if not any(_verifies(key, signature, _encoding(payload)) for signature in signatures):
        return f"{ENVELOPE} was not signed with the key in {key_file}"
    return None


def _read_statement(directory: Path) -> bytes:
    path = directory / EVIDENCE / STATEMENT
    if not path.is_file():
        raise InputError(f"{directory} holds no {EVIDENCE}/{STATEMENT}: give the directory that a run has written")
    return path.read_bytes()


def _encoding(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is signed."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _verifies(key: Any, signature: bytes, content: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, content, *_scheme(key))
    except InvalidSignature:
        return False
    return True


def _scheme(key: Any) -> tuple[Any, ...]:
    """What `sign` and `verify` want beside the content: nothing for Ed25519, hash and scheme for ECDSA."""
    if not hasattr(key, "curve"):
        return ()
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    return (ECDSA(SHA256()),)


def _key_id(key: Any) -> str:
    """sha256 of the key in DER form."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
