"""Ed25519 keys and DSSE envelopes: who made a manifest, and that nobody changed it since.

DSSE: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md. A key's id is the first
16 hex digits of the SHA-256 of its 32 raw public bytes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from edgert.errors import BundleCorrupt, ConfigInvalid, SignatureInvalid

PAYLOAD_TYPE = "application/vnd.edgert.manifest+json"


@dataclass(frozen=True)
class PublicKey:
    """A key that bundles may be signed with."""

    key: Ed25519PublicKey

    @property
    def key_id(self) -> str:
        raw = self.key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return hashlib.sha256(raw).hexdigest()[:16]

    def pem(self) -> bytes:
        return self.key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


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
    """Write both halves as PEM, the private one readable by its owner only. Raises ConfigInvalid if either exists."""
    private_pem = key.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for path, data, mode in ((private_path, private_pem, 0o600), (public_path, key.public.pem(), 0o644)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError as error:
            raise ConfigInvalid(f"{path} exists already; a key is never overwritten: move it away first") from error
        except OSError as error:
            raise ConfigInvalid(f"cannot write {path}: {error.strerror}") from error
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


def read_signing_key(path: Path) -> SigningKey:
    """Raises ConfigInvalid when `path` is missing or holds no unencrypted Ed25519 private key."""
    data = _read(path, "make one with: edgert keys new")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigInvalid(f"{path} is not a private key in PEM form: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigInvalid(f"{path} holds another kind of key; bundles are signed with Ed25519 (edgert keys new)")
    return SigningKey(key)


def read_public_key(path: Path) -> PublicKey:
    """Raises ConfigInvalid when `path` is missing or holds no Ed25519 public key."""
    data = _read(path, "it is written beside the private key by: edgert keys new")
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigInvalid(f"{path} is not a public key in PEM form: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigInvalid(f"{path} holds another kind of key; bundles are signed with Ed25519 (edgert keys new)")
    return PublicKey(key)


def read_trusted_keys(folder: Path) -> tuple[PublicKey, ...]:
    """Every `*.pem` of `folder`, in name order; none where the folder is missing."""
    return tuple(read_public_key(path) for path in sorted(folder.glob("*.pem")))


def sign(payload: bytes, key: SigningKey) -> bytes:
    """The DSSE envelope of `payload`. The same payload and key always give the same bytes."""
    signature = key.key.sign(_pre_authentication_encoding(PAYLOAD_TYPE, payload))
    return _canonical(payload, (key.public.key_id,), (signature,))


@dataclass(frozen=True)
class Envelope:
    """A parsed DSSE envelope whose signature nobody has checked yet. `raw` is the envelope as it came."""

    raw: bytes
    payload: bytes
    key_ids: tuple[str, ...]
    signatures: tuple[bytes, ...]

    def verify(self, trusted: tuple[PublicKey, ...]) -> PublicKey:
        """The trusted key that signed the payload. Raises SignatureInvalid."""
        signed = _pre_authentication_encoding(PAYLOAD_TYPE, self.payload)
        for key in trusted:
            for key_id, signature in zip(self.key_ids, self.signatures, strict=True):
                if key_id != key.key_id:
                    continue
                try:
                    key.key.verify(signature, signed)
                except InvalidSignature:
                    continue
                return key
        known = ", ".join(key.key_id for key in trusted) or "none"
        named = ", ".join(self.key_ids) or "none"
        if any(key.key_id in self.key_ids for key in trusted):
            raise SignatureInvalid(f"the signature of key {named} does not match the manifest: the bundle was changed")
        raise SignatureInvalid(
            f"the bundle is signed by key {named}; this device trusts {known}. "
            "Sign with a trusted key (edgert build --key), or add the key to the device (edgert bootstrap)"
        )


def parse_envelope(data: bytes) -> Envelope:
    """Raises BundleCorrupt when `data` is no DSSE envelope of ours."""
    try:
        value = json.loads(data)
        if value["payloadType"] != PAYLOAD_TYPE:
            raise BundleCorrupt(f"the envelope's payload is {value['payloadType']!r}, not {PAYLOAD_TYPE}")
        entries = value["signatures"]
        if not 1 <= len(entries) <= 16:
            raise BundleCorrupt(f"the envelope has {len(entries)} signatures; 1 to 16 are allowed")
        envelope = Envelope(
            raw=data,
            payload=base64.b64decode(value["payload"], validate=True),
            key_ids=tuple(str(entry["keyid"])[:64] for entry in entries),
            signatures=tuple(base64.b64decode(entry["sig"], validate=True) for entry in entries),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise BundleCorrupt(f"the bundle's envelope cannot be read: {type(error).__name__}") from error
    # Base64 and JSON can say the same in several ways; only one is taken, so that every changed byte shows.
    if _canonical(envelope.payload, envelope.key_ids, envelope.signatures) != data:
        raise BundleCorrupt("the bundle's envelope is not in its one form: the bundle was changed")
    return envelope


def _canonical(payload: bytes, key_ids: tuple[str, ...], signatures: tuple[bytes, ...]) -> bytes:
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [
            {"keyid": key_id, "sig": base64.b64encode(signature).decode()}
            for key_id, signature in zip(key_ids, signatures, strict=True)
        ],
    }
    return json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode()


def _pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """DSSE's PAE: what is signed is the type and the payload, each with its length in front."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(payload), payload)


def _read(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"cannot read key {path}: {error.strerror}; {advice}") from error
