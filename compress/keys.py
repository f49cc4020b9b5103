"""Reading keys from PEM files: Ed25519, or ECDSA on the curve P-256. Everything else is refused by name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.errors import InputError

__all__ = ["PASSWORD", "private_key", "public_key"]

PASSWORD = "COMPRESS_KEY_PASSWORD"  # variable with the password of an encrypted key
INSTALL = "signing needs cryptography: pip install 'compress-gate[sign]'"


def private_key(path: Path) -> Any:
    """An `Ed25519PrivateKey` or `EllipticCurvePrivateKey`.

    Raises:
        InputError: no such file, another kind of key, a wrong password, or cryptography is missing.
    """
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise InputError(INSTALL) from error
    password = os.environ.get(PASSWORD)
    return _load(
        path, "private", lambda content: load_pem_private_key(content, password.encode() if password else None)
    )


def public_key(path: Path) -> Any:
    """An `Ed25519PublicKey` or `EllipticCurvePublicKey`.

    Raises:
        InputError: no such file, another kind of key, or cryptography is missing.
    """
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise InputError(INSTALL) from error
    return _load(path, "public", load_pem_public_key)


def _load(path: Path, kind: str, read: Callable[[bytes], Any]) -> Any:
    try:
        key = read(path.read_bytes())
    except OSError as error:
        raise InputError(f"the {kind} key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} is no {kind} key in PEM form, or its password in {PASSWORD} is missing or wrong ({error})"
        ) from error
    curve = getattr(getattr(key, "curve", None), "name", None)
    if curve != "secp256r1" and not type(key).__name__.endswith(("Ed25519PrivateKey", "Ed25519PublicKey")):
        raise InputError(f"{path} is a key of another kind: give Ed25519, or ECDSA on P-256")
    return key
