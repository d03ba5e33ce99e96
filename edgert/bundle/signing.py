"""Ed25519 keys, which prove who made a manifest and that nobody changed it since.

A key's id is the first 16 hex digits of the SHA-256 of its 32 raw public bytes.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from edgert.errors import ConfigInvalid

KEY_BYTES_MAX = 64 * 1024  # a device such as /dev/zero has no end
# An Ed25519 public key in PEM form is these bytes and its 32 raw ones (RFC 8410). The PEM reader of cryptography takes
# longer to import than `edgertd status` to answer, so keys in this form are read without it.
_PEM_BEGIN, _PEM_END = b"-----BEGIN PUBLIC KEY-----\n", b"\n-----END PUBLIC KEY-----\n"
_DER_HEAD, _DER_BYTES = bytes.fromhex("302a300506032b6570032100"), 44


@dataclass(frozen=True)
class PublicKey:
    """A key that bundles may be signed with."""

    key: Ed25519PublicKey

    @property
    def key_id(self) -> str:
        return hashlib.sha256(self.key.public_bytes_raw()).hexdigest()[:16]

    def made(self, signature: bytes, data: bytes) -> bool:
        """Return whether this key made `signature` of exactly this data."""
        try:
            self.key.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    def pem(self) -> bytes:
        return _PEM_BEGIN + binascii.b2a_base64(_DER_HEAD + self.key.public_bytes_raw(), newline=False) + _PEM_END


@dataclass(frozen=True)
class SigningKey:
    """The private half; it never leaves the host."""

    key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.key.public_key())


def new_key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


def write_key_pair(key: SigningKey, private_path: Path, public_path: Path) -> None:
    """Write both halves as PEM, the private one for its owner only. Raises ConfigInvalid if one exists."""
    from cryptography.hazmat.primitives import serialization

    private_pem = key.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for path, data, mode in ((private_path, private_pem, 0o600), (public_path, key.public.pem(), 0o644)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError as error:
            raise ConfigInvalid(
                f"{path} exists, and a key is never overwritten: use it, give another --name, or move it away"
            ) from error
        except OSError as error:
            raise ConfigInvalid(f"cannot write {path}: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
        except OSError as error:  # half a key would block the next attempt
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise ConfigInvalid(f"cannot write {path}: {error.strerror}") from error


def read_signing_key(path: Path) -> SigningKey:
    """Read an unencrypted Ed25519 private key. Raises ConfigInvalid where `path` is missing or holds none."""
    from cryptography.hazmat.primitives import serialization

    data = _read(path, "make one with: edgert keys new")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigInvalid(
            f"{path} is not an unencrypted private key in PEM form: give the NAME.key.pem of edgert keys new"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigInvalid(f"{path} holds another kind of key; bundles are signed with Ed25519 (edgert keys new)")
    return SigningKey(key)


def read_public_key(path: Path) -> PublicKey:
    """Read an Ed25519 public key. Raises ConfigInvalid where `path` is missing or holds none."""
    data = _read(path, "edgert keys new writes it beside the private key")
    if (plain := _plain_key(data)) is not None:
        return PublicKey(plain)
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigInvalid(f"{path} is not a public key in PEM form: give the NAME.pem of edgert keys new") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigInvalid(f"{path} holds another kind of key; bundles are signed with Ed25519 (edgert keys new)")
    return PublicKey(key)


@dataclass(frozen=True)
class Keyring:
    """The keys that a device trusts, by file, and why other files hold no key; in name order."""

    keys: dict[Path, PublicKey]
    damaged: dict[Path, str]

    @property
    def trusted(self) -> tuple[PublicKey, ...]:
        return tuple(self.keys.values())

    @property
    def complaints(self) -> list[str]:
        """One line per file without a key. Such a file does not affect the other keys."""
        return [
            f"{why}: it is ignored; remove it with: edgertd keys remove {path.name}"
            for path, why in self.damaged.items()
        ]


def read_keyring(folder: Path) -> Keyring:
    """Read every `*.pem` of `folder`; none where the folder is missing."""
    ring = Keyring({}, {})
    for path in sorted(folder.glob("*.pem")):
        try:
            ring.keys[path] = read_public_key(path)
        except ConfigInvalid as error:
            ring.damaged[path] = error.message
    return ring


def _plain_key(pem: bytes) -> Ed25519PublicKey | None:
    """Return the key of a file as `PublicKey.pem` writes it; None for any other content."""
    if not (pem.startswith(_PEM_BEGIN) and pem.endswith(_PEM_END)):
        return None
    with contextlib.suppress(binascii.Error, UnsupportedAlgorithm):
        der = binascii.a2b_base64(pem[len(_PEM_BEGIN) : -len(_PEM_END)])
        if len(der) == _DER_BYTES and der.startswith(_DER_HEAD):
            return Ed25519PublicKey.from_public_bytes(der[len(_DER_HEAD) :])
    return None


def _read(path: Path, advice: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(KEY_BYTES_MAX)
    except OSError as error:
        raise ConfigInvalid(f"cannot read key {path}: {error.strerror}; {advice}") from error
