"""Keys on disk, and envelopes that only the key's owner can make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from edgert.bundle.signing import SigningKey, new_key, read_keyring, read_public_key, read_signing_key, write_key_pair
from edgert.errors import ConfigInvalid
from tests.support.devices import nothing_may_be_written


def test_keys_are_read_back_from_disk_and_only_the_owner_can_read_the_private_key(
    tmp_path: Path, signing_key: SigningKey
) -> None:
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


def test_files_without_such_a_key_are_refused_with_the_next_step(tmp_path: Path, signing_key: SigningKey) -> None:
    write_key_pair(signing_key, tmp_path / "a.key.pem", tmp_path / "a.pem")
    (tmp_path / "text").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    other = generate_private_key(SECP256R1())
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    (tmp_path / "ec.key").write_bytes(other.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    (tmp_path / "ec").write_bytes(other.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    for name in ("a.pem", "text", "ec.key", "missing", ".", "pipe"):
        with pytest.raises(ConfigInvalid):
            read_signing_key(tmp_path / name)
    for name in ("a.key.pem", "text", "ec", "missing", ".", "pipe"):
        with pytest.raises(ConfigInvalid):
            read_public_key(tmp_path / name)
    with pytest.raises(ConfigInvalid, match="edgert keys new"):
        read_signing_key(tmp_path / "missing")
    with pytest.raises(ConfigInvalid):
        read_signing_key(Path("/dev/zero"))  # without an end


def test_trusted_keys_are_read_in_name_order_and_a_damaged_file_does_not_hide_the_others(tmp_path: Path) -> None:
    assert read_keyring(tmp_path / "missing").trusted == ()
    keys = [new_key(), new_key()]
    for name, key in zip("ba", keys, strict=True):
        (tmp_path / f"{name}.pem").write_bytes(key.public.pem())
    (tmp_path / "ab.pem").write_bytes(keys[0].public.pem()[:40])
    ring = read_keyring(tmp_path)
    assert [key.key_id for key in ring.trusted] == [keys[1].public.key_id, keys[0].public.key_id]
    (complaint,) = ring.warnings
    assert "ab.pem is not a public key" in complaint
    assert complaint.endswith("edgertd keys remove ab.pem")
