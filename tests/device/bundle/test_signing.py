"""Keys on disk, and envelopes that only the key's owner can make."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from edgert.bundle.envelope import PAYLOAD_TYPE, parse_envelope, sign
from edgert.bundle.signing import SigningKey, new_key, read_keyring, read_public_key, read_signing_key, write_key_pair
from edgert.errors import BundleCorrupt, ConfigInvalid, SignatureInvalid
from tests.support.devices import nothing_may_be_written

PAYLOAD = b'{"model":"digits"}'


def test_keys_come_back_from_disk_and_the_private_half_is_its_owners(tmp_path: Path, signing_key: SigningKey) -> None:
    private, public = tmp_path / "keys" / "a.key.pem", tmp_path / "keys" / "a.pem"
    write_key_pair(signing_key, private, public)
    assert private.stat().st_mode & 0o777 == 0o600
    assert read_signing_key(private).public.key_id == read_public_key(public).key_id == signing_key.public.key_id
    assert len(signing_key.public.key_id) == 16
    with pytest.raises(ConfigInvalid, match="never overwritten"):
        write_key_pair(new_key(), private, public)
    assert read_signing_key(private).public.key_id == signing_key.public.key_id


def test_a_full_disk_leaves_no_half_key(tmp_path: Path) -> None:
    private = tmp_path / "a.key.pem"
    with nothing_may_be_written(), pytest.raises(ConfigInvalid, match=r"cannot write .*a\.key\.pem"):
        write_key_pair(new_key(), private, tmp_path / "a.pem")
    assert not private.exists()
    write_key_pair(new_key(), private, tmp_path / "a.pem")


def test_the_same_payload_and_key_give_the_same_envelope(signing_key: SigningKey) -> None:
    assert sign(PAYLOAD, signing_key) == sign(PAYLOAD, signing_key)


def test_what_is_signed_is_dsses_pre_authentication_encoding(signing_key: SigningKey) -> None:
    """So that any DSSE tool can check it: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md"""
    envelope = json.loads(sign(PAYLOAD, signing_key))
    signed = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(PAYLOAD), PAYLOAD)
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    signing_key.public.key.verify(signature, signed)
    raw = signing_key.public.key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    assert envelope["signatures"][0]["keyid"] == hashlib.sha256(raw).hexdigest()[:16]


def test_the_trusted_key_that_signed_is_found(signing_key: SigningKey) -> None:
    envelope = parse_envelope(sign(PAYLOAD, signing_key))
    assert envelope.payload == PAYLOAD
    assert envelope.verify((new_key().public, signing_key.public)) == signing_key.public


def test_a_changed_payload_and_an_unknown_key_are_told_apart(signing_key: SigningKey) -> None:
    value = json.loads(sign(PAYLOAD, signing_key))
    value["payload"] = base64.b64encode(PAYLOAD + b" ").decode()
    with pytest.raises(SignatureInvalid, match="was changed"):
        parse_envelope(canonical(value)).verify((signing_key.public,))
    with pytest.raises(SignatureInvalid, match="trusts"):
        parse_envelope(sign(PAYLOAD, signing_key)).verify((new_key().public,))


def test_a_key_id_that_lies_helps_nobody(signing_key: SigningKey) -> None:
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
def test_bytes_that_are_no_envelope_are_refused(data: bytes) -> None:
    with pytest.raises(BundleCorrupt):
        parse_envelope(data)


def test_signatures_of_another_length_do_not_verify(signing_key: SigningKey) -> None:
    for signature in ("", "AA==", base64.b64encode(bytes(64)).decode(), base64.b64encode(bytes(1000)).decode()):
        data = envelope_with(signatures=[{"keyid": signing_key.public.key_id, "sig": signature}])
        with pytest.raises(SignatureInvalid):
            parse_envelope(data).verify((signing_key.public,))


def test_files_that_hold_no_such_key_are_refused_with_the_next_step(tmp_path: Path, signing_key: SigningKey) -> None:
    write_key_pair(signing_key, tmp_path / "a.key.pem", tmp_path / "a.pem")
    (tmp_path / "text").write_text("hello")
    other = generate_private_key(SECP256R1())
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    (tmp_path / "ec.key").write_bytes(other.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    (tmp_path / "ec").write_bytes(other.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    for name in ("a.pem", "text", "ec.key", "missing", "."):
        with pytest.raises(ConfigInvalid):
            read_signing_key(tmp_path / name)
    for name in ("a.key.pem", "text", "ec", "missing", "."):
        with pytest.raises(ConfigInvalid):
            read_public_key(tmp_path / name)
    with pytest.raises(ConfigInvalid, match="edgert keys new"):
        read_signing_key(tmp_path / "missing")


def test_trusted_keys_are_the_folders_in_name_order_and_a_damaged_file_holds_up_no_other(tmp_path: Path) -> None:
    assert read_keyring(tmp_path / "missing").trusted == ()
    keys = [new_key(), new_key()]
    for name, key in zip("ba", keys, strict=True):
        (tmp_path / f"{name}.pem").write_bytes(key.public.pem())
    (tmp_path / "ab.pem").write_bytes(keys[0].public.pem()[:40])
    ring = read_keyring(tmp_path)
    assert [key.key_id for key in ring.trusted] == [keys[1].public.key_id, keys[0].public.key_id]
    (complaint,) = ring.complaints
    assert "ab.pem is not a public key" in complaint
    assert complaint.endswith("edgertd keys remove ab.pem")
