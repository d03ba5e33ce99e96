"""The inventory keeps the user's text, is replaced in one step, and reports faults clearly."""

from __future__ import annotations

import codecs
import multiprocessing
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import (
    Device,
    Inventory,
    SshAddress,
    find_inventory,
    fingerprint,
)
from hil.support.keys import new_ssh_key
from tests.support.devices import WAIT_S_MAX

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKSUTyz1HwHReFVvD5obVsALAgJRNarH4TRpNePnAS"

WRITTEN = """\
# The plant's devices. Ask Ada before you touch line 2.
[devices.kitchen]  # above the oven
transport = "ssh"
address = "pi@10.0.0.7"
host_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGPKSUTyz1HwHReFVvD5obVsALAgJRNarH4TRpNePnAS"
profile = "raspberry-pi-4"
state = "/home/pi/state"
home = "/home/pi/edgert"
groups = ["canary", "line-2"]   # both
tags = ["rack=3", "outdoors"]

[devices.here]
transport = "local"
address = "/srv/here"
profile = "this-machine"
state = "/srv/here"
site = "plant-1"
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    (tmp_path / "inventory.toml").write_text(WRITTEN)
    return Inventory(tmp_path / "inventory.toml")


def a_device(name: str = "new", **changes: object) -> Device:
    return Device(**{**vars(Device(name, "local", "/srv/x", "this-machine", "/srv/x")), **changes})


def test_devices_are_read_with_the_written_values(inventory: Inventory) -> None:
    kitchen, here = inventory.devices()
    assert (kitchen.name, kitchen.address, kitchen.groups) == ("kitchen", "pi@10.0.0.7", ("canary", "line-2"))
    assert here == Device("here", "local", "/srv/here", "this-machine", "/srv/here", site="plant-1")
    assert kitchen.tags == ("rack=3", "outdoors")


def test_a_missing_file_is_an_empty_fleet(tmp_path: Path) -> None:
    assert Inventory(tmp_path / "none.toml").devices() == []


def test_comments_and_order_stay_after_a_change(inventory: Inventory) -> None:
    inventory.add(a_device(groups=("canary",), site="plant-1"))
    inventory.remove("here")
    text = inventory.path.read_text()
    before, _, _ = WRITTEN.partition("[devices.here]")
    assert text.startswith(before.rstrip())
    assert "[devices.here]" not in text
    assert [d.name for d in inventory.devices()] == ["kitchen", "new"]
    assert inventory.device("new") == a_device(groups=("canary",), site="plant-1")


def test_the_comment_of_a_removed_device_goes_and_the_comments_of_others_stay(inventory: Inventory) -> None:
    inventory.path.write_text("# fleet\n\n# the kitchen\n" + WRITTEN.strip() + "\n\n# the end\n")
    inventory.add(a_device())
    inventory.path.write_text(inventory.path.read_text().replace("[devices.here]", "# the host\n[devices.here]"))
    inventory.remove("kitchen")
    text = inventory.path.read_text()
    assert text.startswith("# fleet\n\n# the host\n[devices.here]\n")
    assert "# the end" in text
    inventory.path.write_text("# fleet\n" + WRITTEN)
    inventory.remove("kitchen")
    assert inventory.path.read_text().startswith("# fleet\n# The plant's devices.")


def test_a_file_that_a_change_would_break_stays_as_it_is(inventory: Inventory) -> None:
    local = 'transport = "local", profile = "this-machine"'
    text = "".join(f'devices.{n} = {{{local}, address = "/{n}", state = "/{n}"}}\n# {n}\n' for n in "ab")
    inventory.path.write_text(text)
    with pytest.raises(ConfigInvalid, match="cannot change"):
        inventory.add(a_device())
    assert inventory.path.read_text() == text


def test_the_first_device_creates_the_file_and_its_folder(tmp_path: Path) -> None:
    inventory = Inventory(tmp_path / "deep" / "inventory.toml")
    inventory.add(a_device())
    inventory.add(a_device("second"))
    assert [d.name for d in inventory.devices()] == ["new", "second"]
    assert sorted(p.name for p in inventory.path.parent.iterdir()) == [".inventory.toml.lock", "inventory.toml"]


def test_an_inventory_that_is_a_link_stays_a_link(inventory: Inventory, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(inventory.path)
    Inventory(link).add(a_device())
    assert link.is_symlink()
    assert len(inventory.devices()) == 3


def _add(path: Path, name: str) -> None:
    Inventory(path).add(a_device(name))


def test_simultaneous_changes_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add, args=(path, f"d{i}")) for i in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S_MAX)
    assert sorted(d.name for d in Inventory(path).devices()) == [f"d{i}" for i in range(6)]


@pytest.mark.parametrize("words", ["kitchen,garage", "all"])
def test_a_selector_of_several_devices_is_refused_if_a_command_needs_one(inventory: Inventory, words: str) -> None:
    with pytest.raises(ConfigInvalid):
        inventory.device(words)


def test_a_change_leaves_all_other_lines_unchanged(inventory: Inventory) -> None:
    kitchen = inventory.device("kitchen")
    changed = replace(kitchen, site="plant-2", tags=("rack=4",), groups=(), jump="ops@bastion:2222", jump_host_key=KEY)
    assert inventory.change(["kitchen"], lambda _: changed) == [changed]
    assert inventory.device("kitchen") == changed
    text = inventory.path.read_text()
    for line in WRITTEN.splitlines():
        assert line in text or line.startswith(("groups", "tags")), line
    inventory.change(["kitchen"], lambda _: kitchen)
    assert inventory.devices() == [kitchen, inventory.device("here")]


def test_changes_that_other_commands_made_after_the_file_was_read_are_kept(
    inventory: Inventory, tmp_path: Path
) -> None:
    """A user may need a while to confirm a host key; meanwhile, another command may change the file."""
    other = Inventory(tmp_path / "link.toml")
    other.path.symlink_to(inventory.path)
    inventory.device("kitchen")
    other.change(["kitchen"], lambda device: replace(device, tags=(*device.tags, "floor=2")))
    inventory.change(["kitchen"], lambda device: replace(device, site="plant-2"))
    kitchen = inventory.device("kitchen")
    assert (kitchen.site, kitchen.tags[-1]) == ("plant-2", "floor=2")
    assert [path.name for path in tmp_path.glob(".*.lock")] == [f".{inventory.path.name}.lock"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tags": ("a b",)}, "tag 'a b'"),
        ({"tags": ("rack=1", "rack=2")}, "each key once"),
        ({"groups": ("here",)}, "rename one"),
        ({"jump": "bastion"}, "belong together"),
        ({"jump": "a b", "jump_host_key": KEY}, "not an address"),
        ({"jump": "bastion", "jump_host_key": "ssh-ed25519 !"}, "not a host key"),
    ],
)
def test_an_invalid_change_of_a_device_leaves_the_inventory_unchanged(
    inventory: Inventory, changes: dict[str, object], what: str
) -> None:
    before = inventory.path.read_bytes()
    with pytest.raises(ConfigInvalid, match=what):
        inventory.change(["kitchen"], lambda kitchen: Device(**{**vars(kitchen), **changes}))
    with pytest.raises(ConfigInvalid, match="no device"):
        inventory.change(["nobody"], lambda nobody: nobody)
    assert inventory.path.read_bytes() == before


def test_folders_are_compared_without_a_slash_at_their_end(inventory: Inventory) -> None:
    """In older versions, a slash hid the running monitor from a bootstrap, and the unit from `edgertd stop`."""
    inventory.add(replace(inventory.device("kitchen"), name="other", state="/var/lib/edgert/", home="/opt//edgert/"))
    other = inventory.device("other")
    assert (other.state, other.home) == ("/var/lib/edgert", "/opt/edgert")


@pytest.mark.parametrize(
    "path", ["/home/o'brien/edgert", '/srv/"edgert"', "/srv/$x", "/srv/a\nb", "/srv/a\\b", "/srv/[1]", "/srv/*"]
)
@pytest.mark.parametrize("which", ["state", "home"])
def test_folders_that_cannot_contain_programs_are_refused(inventory: Inventory, which: str, path: str) -> None:
    """In older versions, a bootstrap there failed with a syntax error after it had sent all wheels."""
    with pytest.raises(ConfigInvalid, match="--state and --home"):
        inventory.add(Device(**{**vars(inventory.device("kitchen")), "name": "other", which: path}))
    inventory.add(Device(**{**vars(inventory.device("kitchen")), "name": "other", which: "/srv/my é folder%h"}))


@pytest.mark.parametrize("name", ["all", "Kitchen", "a/b", "", "a b", "a+b", "x" * 64])
def test_names_that_are_invalid_as_topic_or_file_are_refused(inventory: Inventory, name: str) -> None:
    with pytest.raises(ConfigInvalid, match="name"):
        inventory.add(a_device(name))


def test_a_name_that_a_device_or_a_group_already_has_is_refused(inventory: Inventory) -> None:
    before = inventory.path.read_bytes()
    for device in (a_device("here"), a_device("canary"), a_device("new", groups=("here",))):
        with pytest.raises(ConfigInvalid):
            inventory.add(device)
    assert inventory.path.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('transport = "ssh"', 'transport = "ssh', "is not TOML"),
        ('transport = "ssh"', 'transport = "telnet"', "known: ssh, local"),
        ('profile = "raspberry-pi-4"', "", "lacks 'profile'"),
        ('profile = "raspberry-pi-4"', "profile = 4", "profile is 4, not of type str"),
        ('profile = "raspberry-pi-4"', 'profil = "x"', "unknown key 'profil'"),
        ('state = "/home/pi/state"', 'state = "~/state"', "absolute"),
        ("ssh-ed25519 AAAA", "ssh-ed25519 !!!", "not a host key"),
        ("pi@10.0.0.7", "pi@10.0.0.7:99999", "port"),
        ('groups = ["canary", "line-2"]', 'groups = "canary"', "groups is 'canary', not a list"),
        ("[devices.kitchen]", "[device.kitchen]", r"\[devices.NAME\]"),
        ("[devices.kitchen]", "[devices.Kitchen]", "name 'Kitchen'"),
    ],
)
def test_the_error_about_a_broken_inventory_names_the_place(
    inventory: Inventory, old: str, new: str, what: str
) -> None:
    inventory.path.write_text(WRITTEN.replace(old, new))
    with pytest.raises(ConfigInvalid, match=what) as caught:
        inventory.devices()
    assert "inventory.toml" in str(caught.value), "a team has several, and a device many lines"


def test_an_inventory_that_an_editor_of_windows_wrote_is_read_and_changed(inventory: Inventory) -> None:
    plain = inventory.devices()
    inventory.path.write_bytes(codecs.BOM_UTF8 + WRITTEN.replace("\n", "\r\n").encode())
    assert inventory.devices() == plain
    inventory.change(["here"], lambda device: replace(device, site="plant-2"))
    assert inventory.device("here").site == "plant-2"
    assert "# above the oven" in inventory.path.read_text()


def test_an_inventory_that_is_not_text_is_refused(inventory: Inventory) -> None:
    inventory.path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigInvalid, match="is not UTF-8 text"):
        inventory.devices()


def test_an_inventory_below_a_file_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigInvalid, match=r"^cannot read .*/file/inventory.toml: Not a directory$"):
        Inventory(tmp_path / "file/inventory.toml").devices()


def test_an_ssh_device_without_its_host_key_is_refused(inventory: Inventory) -> None:
    inventory.path.write_text("\n".join(line for line in WRITTEN.splitlines() if not line.startswith("host_key")))
    with pytest.raises(ConfigInvalid, match="host_key"):
        inventory.devices()


def test_the_inventory_of_the_project_precedes_the_inventory_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("EDGERT_CONFIG_DIR", raising=False)
    assert find_inventory().path == Path("/home/someone/.config/edgert/inventory.toml")
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    assert find_inventory().path == tmp_path / "conf" / "inventory.toml"
    (tmp_path / "inventory.toml").touch()
    assert find_inventory().path == tmp_path / "conf" / "inventory.toml", "no edgert.toml marks a project"
    (tmp_path / "edgert.toml").touch()
    assert find_inventory().path == tmp_path / "inventory.toml"
    assert find_inventory(Path("other.toml")).path == Path("other.toml")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host", SshAddress("host")),
        ("pi@host", SshAddress("host", "pi")),
        ("pi@host:2222", SshAddress("host", "pi", 2222)),
        ("10.0.0.7:22", SshAddress("10.0.0.7", None, 22)),
        ("fe80::1%eth0", SshAddress("fe80::1%eth0")),
        ("pi@[fe80::1]:2222", SshAddress("fe80::1", "pi", 2222)),
    ],
)
def test_an_address_is_split_into_its_parts(text: str, address: SshAddress) -> None:
    assert SshAddress.parse(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@host",
        "host:",
        "host:x",
        "host:0",
        "host:65536",
        "a b",
        "-oProxyCommand=x",
        "pi@-oProxyCommand=x",
        "pi@$(reboot)",
        "pi;x@h",
        "ssh://pi@h",
    ],
)
def test_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid):
        SshAddress.parse(text)


def test_fingerprints_equal_those_of_ssh_keygen(tmp_path: Path) -> None:
    new_ssh_key(tmp_path / "key")
    shown = subprocess.run(
        ["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True
    ).stdout
    assert fingerprint((tmp_path / "key.pub").read_text()) in shown.split()


def test_the_inventory_records_that_another_device_may_have_the_host_key(inventory: Inventory) -> None:
    kitchen = inventory.device("kitchen")
    inventory.add(replace(kitchen, name="kitchen-2", same_machine=True))
    assert inventory.device("kitchen-2").same_machine
