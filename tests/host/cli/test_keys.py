"""`edgert keys`: a revoked key signs nothing that a device accepts."""

from __future__ import annotations

from pathlib import Path

from edgert.bundle.signing import new_key, read_public_key
from tests.support.commands import Edgert, live


def test_a_key_is_given_by_its_name_or_by_its_file_and_the_error_names_a_missing_key(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    conf = tmp_path / "conf"
    assert edgert("keys", "new", "--name", "ann")[0] == 0
    bundle = here / "echo-1.edgert"
    assert edgert("bundle", "verify", bundle, "--key", "default")[0] == 0
    assert edgert("bundle", "verify", bundle, "--key", conf / "keys" / "default.pem")[0] == 0
    assert edgert("bundle", "verify", bundle, "--key", "ann")[0] == 5
    publish = ("publish", bundle, "--registry", "oci+http://127.0.0.1:1/models", "--channel", "stable")
    code, answer = edgert(*publish, "--key", "ann")
    assert (code, answer["error"]["code"]) == (6, "registry.unreachable"), "the key was found"
    code, answer = edgert(*publish, "--key", "carl")
    assert (code, "choose with --key ann or --key default" in answer["error"]["message"]) == (4, True)
    (conf / "keys" / "ann.key.pem").unlink()
    (conf / "keys" / "default.key.pem").unlink()
    code, answer = edgert(*publish)
    assert (code, "make it with edgert keys new" in answer["error"]["message"]) == (4, True)


def test_a_private_key_that_is_restored_alone_gets_its_public_half_again(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    public = tmp_path / "conf" / "keys" / "default.pem"
    for command in (("keys", "list"), ("bootstrap", "here", "--key", "default", "--dry-run")):
        before = public.read_bytes()
        public.unlink()
        assert edgert(*command)[0] == 0
        assert public.read_bytes() == before
    assert [key["can_sign"] for key in edgert("keys", "list")[1]["keys"]] == [True]


def test_a_device_refuses_the_bundles_of_a_key_after_its_revocation(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    old, new = read_public_key(tmp_path / "conf" / "keys" / "default.pem"), new_key()
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    keys = tmp_path / "dev" / "keys"
    assert edgert("keys", "remove", old.key_id, "here")[0] == 7  # the only key that the device trusts
    (keys / "new.pem").write_bytes(new.public.pem())
    (keys / "torn.pem").write_bytes(b"-----BEGIN PUBLIC KEY-----\nMCow")
    assert edgert("status", "here")[0] == 0  # the device ignores a damaged file
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
