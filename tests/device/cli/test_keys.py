"""`edgertd keys`: the keys that the command removes, and the last key, which must stay."""

from __future__ import annotations

import os

import pytest

from edgert.bundle.signing import new_key
from tests.support.devices import a_device

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


def test_keys_are_removed_by_id_or_by_file_and_the_last_key_only_by_force() -> None:
    with a_device(started=False) as device:
        other = new_key().public
        (device.state.keys / "other.pem").write_bytes(other.pem())
        (device.state.keys / "damaged.pem").write_bytes(b"no key")
        told = device.run("keys", "list")
        assert {row["key_id"] for row in told["keys"]} == {device.key.public.key_id, other.key_id}
        assert "damaged.pem" in told["damaged"][0]
        assert "this device trusts" in device.run("keys", "remove", "nothing", code=4)["error"]["message"]
        device.run("keys", "remove", "damaged.pem")
        assert device.run("keys", "remove", other.key_id)["keys"] == [device.key.public.key_id]
        assert "use --force" in device.run("keys", "remove", "test.pem", code=7)["error"]["message"]
        assert device.run("keys", "remove", "test.pem", "--force")["keys"] == []
        assert os.listdir(device.state.keys) == []


def test_a_key_in_two_files_is_removed_from_both() -> None:
    with a_device(started=False) as device:
        other = new_key().public
        for name in ("one.pem", "two.pem"):
            (device.state.keys / name).write_bytes(other.pem())
        device.run("keys", "remove", other.key_id)
        assert os.listdir(device.state.keys) == ["test.pem"]


def test_a_link_in_place_of_the_key_folder_is_not_followed() -> None:
    with a_device(started=False) as device:
        elsewhere = device.folder / "elsewhere"
        device.state.keys.rename(elsewhere)
        device.state.keys.symlink_to(elsewhere)
        device.run("keys", "remove", "test.pem", "--force", code=7)
        assert os.listdir(elsewhere) == ["test.pem"]
