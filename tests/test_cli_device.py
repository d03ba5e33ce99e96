"""The fleet's commands as a user types them: what they print, what they record, what they exit with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from edgert.cli import main as edgertd
from edgert.signing import new_key, write_key_pair
from edgert_deploy.bootstrap import Broker, merged_config
from edgert_deploy.cli import main
from edgert_deploy.cli.keys import key_paths
from edgert_deploy.inventory import Inventory
from hil.sshd import SshDevice, free_port, running_sshd
from tests.bundles import flip_bit, make_null_bundle


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """An empty fleet in a configuration folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    return Inventory(tmp_path / "conf" / "inventory.toml")


class Edgert:
    """`edgert WORDS --json`: exit code and the object on stdout."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.stderr = ""

    def __call__(self, *words: object) -> tuple[int, dict[str, Any]]:
        self._capfd.readouterr()
        code = main([*map(str, words), "--json"])
        out, self.stderr = self._capfd.readouterr()
        return code, json.loads(out)


@pytest.fixture
def edgert(capfd: pytest.CaptureFixture[str]) -> Edgert:
    return Edgert(capfd)


def test_a_local_device_is_added_listed_and_removed(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> None:
    code, added = edgert("device", "add", "here", "--local", "dev", "--group", "lab", "--site", "plant-1")
    assert code == 0
    assert added["device"]["state"] == str(tmp_path / "dev")
    assert added["device"]["profile"] == "this-machine"
    assert (inventory.device("here").groups, inventory.device("here").site) == (("lab",), "plant-1")
    code, listed = edgert("device", "list", "lab")
    assert [d["name"] for d in listed["devices"]] == ["here"]
    assert edgert("device", "remove", "here")[0] == 0
    assert edgert("device", "list") == (0, {"devices": [], "inventory": str(inventory.path)})


def test_the_option_inventory_names_another_file(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    assert edgert("device", "add", "here", "--local", "dev", "--inventory", other)[0] == 0
    assert not inventory.path.exists()
    assert [d.name for d in Inventory(other).devices()] == ["here"]


def test_an_ssh_device_is_pinned_and_asked_what_it_is(edgert: Edgert, inventory: Inventory, sshd: SshDevice) -> None:
    words = ("device", "add", "board", sshd.address, "--identity", sshd.client_key, "--fingerprint", sshd.fingerprint)
    code, added = edgert(*words, "--profile", "this-machine", "--state", sshd.state, "--home", sshd.home / "edgert")
    assert code == 0, added
    board = inventory.device("board")
    assert board.host_key == sshd.host_key
    assert added["device"]["fingerprint"] == sshd.fingerprint
    assert (board.transport, board.state, board.home) == ("ssh", str(sshd.state), str(sshd.home / "edgert"))


def test_without_a_fingerprint_and_without_a_person_nothing_is_added(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice
) -> None:
    code, answer = edgert("device", "add", "board", sshd.address, "--identity", sshd.client_key)
    assert code == 4
    assert sshd.fingerprint in answer["error"]["message"]
    assert inventory.devices() == []


def test_another_fingerprint_than_the_expected_one_adds_nothing(
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


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("device", "add", "x"), 2),
        (("device", "add", "x", "host", "--local", "d"), 2),
        (("device", "add", "X", "--local", "d"), 4),
        (("device", "add", "x", "--local", "d", "--profile", "no-such"), 4),
        (("device", "add", "x", "--local", "d" * 120), 4),
        (("device", "remove", "nobody"), 4),
        (("device", "list", "nobody"), 0),
        (("status",), 4),
        (("deploy", "none.edgert", "--to", "all"), 4),
        (("bootstrap", "nobody"), 4),
        (("rollback", "echo", "--on", "nobody"), 4),
        (("infer", "echo", "--input", "none.npy", "--socket", "s"), 4),
    ],
)
def test_wrong_words_have_their_exit_codes(
    edgert: Edgert, inventory: Inventory, words: tuple[str, ...], code: int
) -> None:
    assert edgert(*words)[0] == code
    assert inventory.devices() == []


def test_a_damaged_bundle_is_refused_before_a_device_is_asked(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice, tmp_path: Path
) -> None:
    """The device's port is closed: had it been asked, the error would be another."""
    inventory.add(sshd.device(port=free_port()))
    flipped = flip_bit(make_null_bundle(tmp_path / "b", new_key(), padding_bytes=5000), -3000)
    code, answer = edgert("deploy", flipped, "--to", "board")
    assert (code, answer["error"]["code"]) == (5, "bundle.corrupt")


def test_one_device_that_does_not_answer_does_not_hold_up_the_rest(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice, tmp_path: Path
) -> None:
    key = new_key()
    write_key_pair(key, *key_paths(tmp_path / "conf" / "keys", "default"))
    edgert("device", "add", "here", "--local", "dev")
    inventory.add(sshd.device("gone", port=free_port()))
    bundle = make_null_bundle(tmp_path / "b", key)
    try:
        code, answer = edgert("deploy", bundle, "--to", "all")
        assert (code, answer["ok"]) == (6, False)
        assert [(d["device"], d["result"], d["serving"]) for d in answer["devices"]] == [
            ("here", "live", 1),
            ("gone", "failed", None),
        ]
        assert answer["devices"][1]["error"]["code"] == "device.unreachable"
        assert edgert("deploy", bundle, "--to", "here")[1]["devices"][0]["result"] == "unchanged"
        code, asked = edgert("status")
        assert code == 6
        assert asked["devices"][0]["status"]["models"][0]["active"]["release"] == 1
        code, planned = edgert("deploy", make_null_bundle(tmp_path / "b", key, release=2), "--to", "here", "--dry-run")
        assert (code, planned["devices"][0]["result"]) == (0, "planned")
        assert planned["devices"][0]["steps"] == ["send", "install", "activate", "check", "mark-good"]
        # The text for people, once.
        assert main(["status", "here"]) == 0
        assert main(["device", "list"]) == 0
    finally:
        _stop(tmp_path / "dev")


def test_help_shows_an_example_for_each_command(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["device"], ["device", "add"], ["bootstrap"], ["deploy"], ["status"], ["rollback"], ["infer"]):
        assert main([*words, "--help"]) == 0
        assert f"edgert {' '.join(words)}" in capfd.readouterr().out.partition("Example")[2], words


def test_what_the_user_wrote_into_the_devices_configuration_stays() -> None:
    present = '# ours\ndevice = "old"\n\n[serving]\nthreads = 2  # measured\n\n[mqtt]\nhost = "a"\ncert = "c"\n'
    merged = merged_config(present, {"device": "new", "site": "s", "mqtt": {"host": "b", "port": 1883}})
    assert "threads = 2  # measured" in merged
    value = tomlkit.parse(merged).unwrap()
    assert value == {
        "device": "new",
        "site": "s",
        "serving": {"threads": 2},
        "mqtt": {"host": "b", "cert": "c", "port": 1883},
    }
    assert merged_config(merged, {"device": "new", "site": "s"}) == merged


@pytest.mark.parametrize(
    ("text", "ca", "host", "port"),
    [
        ("10.0.0.1", None, "10.0.0.1", 1883),
        ("broker:1884", None, "broker", 1884),
        ("broker", Path("ca.pem"), "broker", 8883),
        ("[fe80::1]:8883", None, "fe80::1", 8883),
        ("[fe80::1]", None, "fe80::1", 1883),
    ],
)
def test_brokers(text: str, ca: Path | None, host: str, port: int) -> None:
    broker = Broker.parse(text, "", None, ca)
    assert (broker.host, broker.port) == (host, port)


def _stop(state: Path) -> None:
    assert edgertd(["--state", str(state), "stop"]) == 0
