"""DSSE envelopes: each holds a manifest, a channel's statement or a runtime's release, and signatures.

DSSE: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md. Workers import this
module, so it does not import the package cryptography. Workers read only envelopes that were verified at installation.
The keys of `edgert.bundle.signing` sign and verify.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgert.errors import BundleCorrupt, SignatureInvalid

if TYPE_CHECKING:
    from edgert.bundle.signing import PublicKey, SigningKey

ENVELOPE_NAME = "manifest.dsse.json"  # the file's name in a bundle and in a slot
PAYLOAD_TYPE = "application/vnd.edgert.manifest+json"
CHANNEL_PAYLOAD_TYPE = "application/vnd.edgert.channel+json"
RUNTIME_PAYLOAD_TYPE = "application/vnd.edgert.runtime+json"
# The names of the contents in messages.
_WHAT = {PAYLOAD_TYPE: "bundle", CHANNEL_PAYLOAD_TYPE: "channel", RUNTIME_PAYLOAD_TYPE: "runtime"}


def sign(payload: bytes, key: SigningKey, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return the DSSE envelope of `payload`. The same payload, type and key always give the same bytes."""
    signature = key.key.sign(_pre_authentication_encoding(payload_type, payload))
    return _canonical(payload_type, payload, (key.public.key_id,), (signature,))


@dataclass(frozen=True)
class Envelope:
    """A parsed DSSE envelope, not verified yet. `raw` holds the original bytes."""

    raw: bytes
    payload: bytes
    key_ids: tuple[str, ...]
    signatures: tuple[bytes, ...]
    payload_type: str = PAYLOAD_TYPE

    @property
    def digest(self) -> str:
        """The SHA-256 of the payload. A manifest's digest identifies the whole bundle."""
        return hashlib.sha256(self.payload).hexdigest()

    def verify(self, trusted: tuple[PublicKey, ...]) -> PublicKey:
        """Return the trusted key that signed the payload. Raises SignatureInvalid."""
        signed = _pre_authentication_encoding(self.payload_type, self.payload)
        what = _WHAT[self.payload_type]
        for key in trusted:
            for key_id, signature in zip(self.key_ids, self.signatures, strict=True):
                if key_id == key.key_id and key.verifies(signature, signed):
                    return key
        known = ", ".join(key.key_id for key in trusted) or "none"
        named = ", ".join(self.key_ids) or "none"
        if any(key.key_id in self.key_ids for key in trusted):
            raise SignatureInvalid(
                f"the signature of key {named} does not match, so the {what} was changed: send it again"
            )
        raise SignatureInvalid(
            f"the {what} is signed by key {named}, and only these are trusted here: {known}. Sign with a trusted key "
            "(--key), or trust this one: edgert bootstrap DEVICE --key FILE, or edgert bundle verify --key FILE"
        )


def parse_envelope(data: bytes, payload_type: str = PAYLOAD_TYPE) -> Envelope:
    """Parse an envelope. Raises BundleCorrupt if `data` is not a DSSE envelope of `payload_type`."""
    try:
        value = json.loads(data)
        if value["payloadType"] != payload_type:
            raise BundleCorrupt(f"the envelope's payload is {str(value['payloadType'])[:80]!r}, not {payload_type}")
        entries = value["signatures"]
        if not 1 <= len(entries) <= 16:
            raise BundleCorrupt(f"the envelope has {len(entries)} signatures; 1 to 16 are allowed")
        envelope = Envelope(
            raw=data,
            payload=base64.b64decode(value["payload"], validate=True),
            key_ids=tuple(str(entry["keyid"])[:64] for entry in entries),
            signatures=tuple(base64.b64decode(entry["sig"], validate=True) for entry in entries),
            payload_type=payload_type,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise BundleCorrupt(f"the {_WHAT[payload_type]}'s envelope is damaged: send it again") from error
    # Base64 and JSON have several forms of one value. The parser accepts one form only, to detect each changed byte.
    if _canonical(payload_type, envelope.payload, envelope.key_ids, envelope.signatures) != data:
        what = _WHAT[payload_type]
        raise BundleCorrupt(f"the {what}'s envelope is not in canonical form, so the {what} was changed: send it again")
    return envelope


def _canonical(payload_type: str, payload: bytes, key_ids: tuple[str, ...], signatures: tuple[bytes, ...]) -> bytes:
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": [
            {"keyid": key_id, "sig": base64.b64encode(signature).decode()}
            for key_id, signature in zip(key_ids, signatures, strict=True)
        ],
    }
    return json.dumps(envelope, sort_keys=True, separators=(",", ":")).encode()


def _pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes to sign (the PAE of DSSE): type and payload, each after its length."""
    return b"DSSEv1 %d %s %d %s" % (len(payload_type), payload_type.encode(), len(payload), payload)
