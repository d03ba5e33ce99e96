"""Ed25519 keys. A signature proves which key signed a manifest, and that the manifest is unchanged.

A key's id is the first 16 hex digits of the SHA-256 of its 32 raw public bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from edgert.durable import os_error_as
from edgert.errors import ConfigInvalid
from edgert.toml_file import refuse_pipe

KEY_BYTES_MAX = 64 * 1024  # a limit, because files such as /dev/zero have no end


@dataclass(frozen=True)
class PublicKey:
    """A key that verifies signatures."""

    key: Ed25519PublicKey

    @property
    def key_id(self) -> str:
        raw = self.key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return hashlib.sha256(raw).hexdigest()[:16]

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Return whether this key made `signature` of exactly this data."""
        try:
            self.key.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    def pem(self) -> bytes:
        return self.key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class SigningKey:
    """The private half of a key pair. The private half never leaves the host."""

    key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.key.public_key())


def new_key() -> SigningKey:
    return SigningKey(Ed25519PrivateKey.generate())


def write_key_pair(key: SigningKey, private_path: Path, public_path: Path) -> None:
    """Write both keys as PEM; only the owner may read the private key. Raises ConfigInvalid."""
    private_pem = key.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for path, data, mode in ((private_path, private_pem, 0o600), (public_path, key.public.pem(), 0o644)):
        with os_error_as(ConfigInvalid, f"cannot write {path}", "check the folder's rights and its free space"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            except FileExistsError as error:
                raise ConfigInvalid(
                    f"{path} exists, and keys are never overwritten: use it, give another --name, or move the file away"
                ) from error
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            except OSError:  # remove an incomplete file: it would block the next attempt
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                raise


def read_signing_key(path: Path) -> SigningKey:
    """Read an unencrypted Ed25519 private key. Raises ConfigInvalid if `path` contains no such key."""
    data = _read(path, "create one with: edgert keys new")
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
    """Read an Ed25519 public key. Raises ConfigInvalid if `path` contains no such key."""
    data = _read(path, "edgert keys new writes it beside the private key")
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigInvalid(f"{path} is not a public key in PEM form: give the NAME.pem of edgert keys new") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigInvalid(f"{path} holds another kind of key; bundles are signed with Ed25519 (edgert keys new)")
    return PublicKey(key)


@dataclass(frozen=True)
class Keyring:
    """The keys that a device trusts, by file. `damaged` has the reason for each file that contains no key."""

    keys: dict[Path, PublicKey]
    damaged: dict[Path, str]

    @property
    def trusted(self) -> tuple[PublicKey, ...]:
        return tuple(self.keys.values())

    @property
    def warnings(self) -> list[str]:
        """One line for each file that contains no key. Such a file does not affect the keys of other files."""
        return [
            f"{why}: it is ignored; remove it with: edgertd keys remove {path.name}"
            for path, why in self.damaged.items()
        ]


def read_keyring(folder: Path) -> Keyring:
    """Read every `*.pem` in `folder`. Return no keys if the folder is missing."""
    ring = Keyring({}, {})
    for path in sorted(folder.glob("*.pem")):
        try:
            ring.keys[path] = read_public_key(path)
        except ConfigInvalid as error:
            ring.damaged[path] = error.message
    return ring


def _read(path: Path, advice: str) -> bytes:
    with os_error_as(ConfigInvalid, f"cannot read key {path}", advice):
        refuse_pipe(path)
        with path.open("rb") as file:
            return file.read(KEY_BYTES_MAX)
