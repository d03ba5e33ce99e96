"""Envelopes: the bytes are canonical, and only the owner of a trusted key can make a valid envelope."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from edgert.bundle.envelope import PAYLOAD_TYPE, parse_envelope, sign
from edgert.bundle.signing import SigningKey, new_key
from edgert.errors import BundleCorrupt, SignatureInvalid

PAYLOAD = b'{"model":"digits"}'


def test_two_signatures_of_one_payload_with_one_key_give_equal_envelopes(signing_key: SigningKey) -> None:
    assert sign(PAYLOAD, signing_key) == sign(PAYLOAD, signing_key)


def test_the_signed_bytes_are_dsses_pre_authentication_encoding(signing_key: SigningKey) -> None:
    """Any DSSE tool can check the signature: github.com/secure-systems-lab/dsse/blob/master/protocol.md."""
    envelope = json.loads(sign(PAYLOAD, signing_key))
    signed = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(PAYLOAD), PAYLOAD)
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    signing_key.public.key.verify(signature, signed)
    raw = signing_key.public.key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    assert envelope["signatures"][0]["keyid"] == hashlib.sha256(raw).hexdigest()[:16]


def test_verification_returns_the_trusted_key_that_signed(signing_key: SigningKey) -> None:
    envelope = parse_envelope(sign(PAYLOAD, signing_key))
    assert envelope.payload == PAYLOAD
    assert envelope.verify((new_key().public, signing_key.public)) == signing_key.public


def test_the_error_distinguishes_a_changed_payload_from_an_unknown_key(signing_key: SigningKey) -> None:
    value = json.loads(sign(PAYLOAD, signing_key))
    value["payload"] = base64.b64encode(PAYLOAD + b" ").decode()
    with pytest.raises(SignatureInvalid, match="was changed"):
        parse_envelope(canonical(value)).verify((signing_key.public,))
    with pytest.raises(SignatureInvalid, match="trusted here: "):
        parse_envelope(sign(PAYLOAD, signing_key)).verify((new_key().public,))


def test_a_forged_key_id_does_not_make_a_signature_valid(signing_key: SigningKey) -> None:
    forged = json.loads(sign(PAYLOAD, new_key()))
    forged["signatures"][0]["keyid"] = signing_key.public.key_id
    with pytest.raises(SignatureInvalid):
        parse_envelope(canonical(forged)).verify((signing_key.public,))


def canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def envelope_with(**changes: Any) -> bytes:
    return canonical({**json.loads(sign(PAYLOAD, new_key())), **changes})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        envelope_with(payloadType="text/plain"),
        envelope_with(payload="not base64!"),
        envelope_with(payload=None),
        envelope_with(signatures=[]),
        envelope_with(signatures=[{}]),
        envelope_with(signatures=[{"keyid": "a", "sig": "%%%"}]),
        envelope_with(signatures=[{"keyid": "a", "sig": "AA=="}] * 17),
        envelope_with(signatures=5),
    ],
)
def test_bytes_that_are_not_an_envelope_are_refused(data: bytes) -> None:
    with pytest.raises(BundleCorrupt):
        parse_envelope(data)


def test_signatures_of_another_length_do_not_verify(signing_key: SigningKey) -> None:
    for signature in ("", "AA==", base64.b64encode(bytes(64)).decode(), base64.b64encode(bytes(1000)).decode()):
        data = envelope_with(signatures=[{"keyid": signing_key.public.key_id, "sig": signature}])
        with pytest.raises(SignatureInvalid):
            parse_envelope(data).verify((signing_key.public,))
