"""`edgert keys`: a revoked key signs nothing that a device accepts."""

from __future__ import annotations

from pathlib import Path

from edgert.bundle.signing import new_key, read_public_key
from tests.support.commands import Edgert, live


def test_a_key_is_revoked_on_a_device_and_what_it_signed_is_refused_from_then_on(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    old, new = read_public_key(tmp_path / "conf" / "keys" / "default.pem"), new_key()
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    keys = tmp_path / "dev" / "keys"
    assert edgert("keys", "remove", old.key_id, "here")[0] == 7  # the only one
    (keys / "new.pem").write_bytes(new.public.pem())
    (keys / "torn.pem").write_bytes(b"-----BEGIN PUBLIC KEY-----\nMCow")
    assert edgert("status", "here")[0] == 0  # a damaged file is passed over
    code, listed = edgert("keys", "list", "here")
    (device,) = listed["devices"]
    assert (code, sorted(device["keys"])) == (0, sorted([old.key_id, new.public.key_id]))
    assert ["torn.pem" in complaint for complaint in device["damaged"]] == [True]
    assert edgert("keys", "remove", "torn.pem", "here")[0] == 0
    code, removed = edgert("keys", "remove", old.key_id, "here")
    assert (code, removed["devices"][0]["keys"]) == (0, [new.public.key_id])
    assert edgert("keys", "remove", old.key_id, "here")[0] == 4
    code, _ = edgert("deploy", here / "echo-2.edgert", "here", "--dry-run")
    assert code == 5
    assert live(edgert)[0] == 1
    assert [path.name for path in keys.iterdir()] == ["new.pem"]
