"""`edgert device`: devices are added, probed, changed and removed, with their host keys pinned."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Inventory
from hil.support.keys import new_ssh_key
from hil.support.sshd import SshDevice
from tests.support.commands import Edgert
from tests.support.servers.ports import free_port


def test_a_local_device_is_added_listed_and_removed(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> None:
    code, added = edgert("device", "add", "here", "--local", "dev", "--group", "lab", "--site", "plant-1")
    assert code == 0
    assert added["device"]["state"] == str(tmp_path / "dev")
    assert added["device"]["profile"] == "this-machine"
    assert (inventory.device("here").groups, inventory.device("here").site) == (("lab",), "plant-1")
    code, listed = edgert("device", "list", "lab")
    assert [d["name"] for d in listed["devices"]] == ["here"]
    code, answer = edgert("device", "add", "again", "--local", "dev")
    assert (code, answer["error"]["message"][:31]) == (4, "again has the folder of here, /")
    assert edgert("device", "remove", "here")[0] == 0
    assert edgert("device", "list") == (0, {"devices": [], "inventory": str(inventory.path)})


def test_the_error_names_a_folder_whose_name_is_not_utf_8(edgert: Edgert, inventory: Inventory) -> None:
    """An inventory cannot contain the name, because TOML is UTF-8."""
    code, answer = edgert("device", "add", "here", "--local", os.fsdecode(b"lat\xe9in"))
    assert (code, answer["error"]["code"]) == (4, "input.config_invalid")
    assert "lat\udce9in" in answer["error"]["message"]
    assert "is not UTF-8: rename that file or folder" in answer["error"]["message"]
    assert not inventory.devices()


def test_the_option_inventory_names_another_file(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    assert edgert("device", "add", "here", "--local", "dev", "--inventory", other)[0] == 0
    assert not inventory.path.exists()
    assert [d.name for d in Inventory(other).devices()] == ["here"]


def test_the_host_key_of_an_ssh_device_is_pinned_and_the_device_is_probed(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice
) -> None:
    words = ("device", "add", "board", sshd.address, "--identity", sshd.client_key, "--fingerprint", sshd.fingerprint)
    code, added = edgert(*words, "--profile", "this-machine", "--state", sshd.state, "--home", sshd.home / "edgert")
    assert code == 0, added
    board = inventory.device("board")
    assert board.host_key == sshd.host_key
    assert added["device"]["fingerprint"] == sshd.fingerprint
    assert (board.transport, board.state, board.home) == ("ssh", str(sshd.state), str(sshd.home / "edgert"))


def test_a_device_behind_a_jump_host_has_both_keys_pinned(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice
) -> None:
    key = ("--identity", sshd.client_key, "--fingerprint", sshd.fingerprint)
    words = ("device", "add", "board", sshd.address, *key, "--jump", sshd.address, "--profile", "this-machine")
    code, answer = edgert(*words)
    assert code == 4
    assert "--jump-fingerprint" in answer["error"]["message"]
    assert edgert(*words, "--jump-fingerprint", "SHA256:" + "A" * 43)[0] == 6
    assert inventory.devices() == []
    code, added = edgert(*words, "--jump-fingerprint", sshd.fingerprint, "--tag", "rack=3")
    assert code == 0, added
    assert (inventory.device("board").jump_host_key, added["device"]["tags"]) == (sshd.host_key, ["rack=3"])


def test_devices_are_changed_in_the_inventory(edgert: Edgert, inventory: Inventory, sshd: SshDevice) -> None:
    new_ssh_key(sshd.folder / "old_key")
    old = " ".join((sshd.folder / "old_key.pub").read_text().split()[:2])
    inventory.add(sshd.device("one", host_key=old))
    inventory.add(sshd.device("two"))
    code, changed = edgert("device", "set", "all", "--tag", "rack=1", "--group", "canary", "--site", "plant-2")
    assert (code, [d["name"] for d in changed["changed"]]) == (0, ["one", "two"])
    assert edgert("device", "set", "all", "--tag", "rack=1")[1]["changed"] == []
    assert (
        edgert("device", "set", "two", "--tag", "rack=2", "--ungroup", "canary", "--profile", "generic-x86-64")[0] == 0
    )
    two = inventory.device("two")
    assert (two.tags, two.groups, two.profile, two.host_key) == (("rack=2",), (), "generic-x86-64", sshd.host_key)
    # The command pins a new host key only on request.
    assert edgert("device", "set", "one", "--address", sshd.address.replace("127.0.0.1", "localhost"))[0] == 0
    assert inventory.device("one").host_key == old
    assert edgert("device", "set", "one", "--repin")[0] == 4
    assert edgert("device", "set", "all", "--repin")[0] == 2
    assert edgert("device", "set", "one", "--address", sshd.address, "--fingerprint", sshd.fingerprint)[0] == 0
    assert inventory.device("one").host_key == sshd.host_key
    assert edgert("device", "set", "one", "--jump", sshd.address, "--jump-fingerprint", sshd.fingerprint)[0] == 0
    assert inventory.device("one").jump == sshd.address
    assert edgert("device", "set", "one", "--no-jump", "--no-identity", "--untag", "rack")[0] == 0
    one = inventory.device("one")
    assert (one.jump, one.jump_host_key, one.identity, one.tags) == ("", "", "", ())
    assert edgert("device", "set", "one", "--profile", "none-such")[0] == 4
    assert edgert("device", "set", "one", "--tag", "a b")[0] == 4
    assert inventory.device("one") == one


def test_the_local_device_has_a_site_and_no_address(
    edgert: Edgert, inventory: Inventory, capfd: pytest.CaptureFixture[str]
) -> None:
    assert edgert("device", "add", "here", "--local", "dev")[0] == 0
    before = inventory.device("here")
    for words in (["--address", "pi@h"], ["--jump", "nobody.invalid"], ["--repin"]):
        assert edgert("device", "set", "here", *words)[0] == 2, words
    assert edgert("device", "set", "all", "--no-jump", "--no-identity")[0] == 0, "there is nothing to remove"
    assert inventory.device("here") == before
    capfd.readouterr()
    assert main(["device", "set", "here", "--site", "plant-2"]) == 0
    told = capfd.readouterr().err
    assert "next: edgert bootstrap here" in told
    assert (
        "forget here --site default --store '' clears the messages that the broker retains for its former site" in told
    )
    assert main(["device", "set", "here", "--tag", "rack=1"]) == 0
    told = capfd.readouterr().err
    assert "former site" not in told
    assert "next: edgert bootstrap here, if these devices follow a channel" in told


def test_a_machine_is_probed_and_its_profile_is_recorded_only_on_request(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice, capfd: pytest.CaptureFixture[str]
) -> None:
    inventory.add(replace(sshd.device("board"), profile="raspberry-pi-4"))
    inventory.add(sshd.device("gone", port=free_port()))
    code, answer = edgert("device", "probe", "all")
    assert (code, answer["ok"], answer["saved"]) == (6, False, [])
    board, gone = answer["devices"]
    assert gone["error"]["code"] == "device.unreachable"
    assert (board["in_inventory"], board["facts"]["machine"]) == ("raspberry-pi-4", platform.machine())
    misses = {one["profile"]: one["misses"] for one in board["profiles"]}
    assert "is for armv7l" in misses["raspberry-pi-3"]
    assert misses[board["profile"]] == []
    assert inventory.device("board").profile == "raspberry-pi-4"
    assert edgert("device", "probe", "board", "--save")[1]["saved"] == ["board"]
    assert inventory.device("board").profile == board["profile"]
    # The machine is in no inventory. The user must agree to its key, and the command does not record the machine.
    address = ("device", "probe", sshd.address, "--identity", sshd.client_key)
    assert edgert(*address)[0] == 4
    code, answer = edgert(*address, "--fingerprint", sshd.fingerprint)
    assert (code, answer["devices"][0]["profile"]) == (0, board["profile"])
    assert len(inventory.devices()) == 2
    assert edgert(*address, "--save")[0] == 2
    code, answer = edgert("device", "probe", "board", "--fingerprint", sshd.fingerprint)  # a name in ~/.ssh/config
    assert (code, "give USER@board" in answer["error"]["message"]) == (2, True)
    assert main(["device", "probe", "board"]) == 0
    shown = capfd.readouterr().out
    assert f"profile      {board['profile']}" in shown
    assert "matches less well" in shown, "profiles that are not chosen, although nothing excludes them"


def test_without_a_fingerprint_and_without_a_terminal_no_device_is_added(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice
) -> None:
    code, answer = edgert("device", "add", "board", sshd.address, "--identity", sshd.client_key)
    assert code == 4
    assert sshd.fingerprint in answer["error"]["message"]
    assert inventory.devices() == []


def test_a_second_name_of_one_machine_is_refused(edgert: Edgert, inventory: Inventory, sshd: SshDevice) -> None:
    inventory.add(sshd.device("first"))
    words = ("device", "add", "second", sshd.address, "--identity", sshd.client_key, "--fingerprint", sshd.fingerprint)
    code, answer = edgert(*words, "--profile", "this-machine")
    assert (code, answer["error"]["code"]) == (4, "input.config_invalid")
    assert "second has the host key of first" in answer["error"]["message"]
    assert [device.name for device in inventory.devices()] == ["first"]
    assert edgert(*words, "--profile", "this-machine", "--same-machine")[0] == 0
    assert inventory.device("second").same_machine


def test_a_device_with_another_fingerprint_than_expected_is_not_added(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice
) -> None:
    wrong = "SHA256:" + "A" * 43
    code, answer = edgert("device", "add", "board", sshd.address, "--fingerprint", wrong)
    assert (code, answer["error"]["code"]) == (6, "device.host_key_mismatch")
    assert inventory.devices() == []


def test_a_device_that_does_not_answer_is_not_added(edgert: Edgert, inventory: Inventory) -> None:
    code, answer = edgert("device", "add", "board", f"root@127.0.0.1:{free_port()}", "--fingerprint", "SHA256:x")
    assert (code, answer["error"]["code"]) == (6, "device.unreachable")
    assert inventory.devices() == []
