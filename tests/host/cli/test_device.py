"""The fleet's commands as a user types them: what they print, what they record, what they exit with."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.bundle.signing import new_key, read_public_key, write_key_pair
from edgert.cli import main as edgertd
from edgert.config import read_config
from edgert.versions.install import install
from edgert_deploy.cli import main
from edgert_deploy.common.keys import key_paths
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.doctor.device import check_device
from hil.keys import new_ssh_key
from hil.sshd import SshDevice, free_port, running_sshd
from tests.support import devices
from tests.support.bundles import flip_bit, make_null_bundle
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """An empty fleet in a configuration folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    # A host key is pinned anew where that is asked for only.
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


def test_a_machine_is_probed_and_its_profile_recorded_only_when_asked(
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
    # A machine that is in no inventory; its key must be agreed to, and it is not recorded.
    address = ("device", "probe", sshd.address, "--identity", sshd.client_key)
    assert edgert(*address)[0] == 4
    code, answer = edgert(*address, "--fingerprint", sshd.fingerprint)
    assert (code, answer["devices"][0]["profile"]) == (0, board["profile"])
    assert len(inventory.devices()) == 2
    assert edgert(*address, "--save")[0] == 2
    assert main(["device", "probe", "board"]) == 0
    assert f"profile      {board['profile']}" in capfd.readouterr().out


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
        (("deploy", "none.edgert", "all"), 4),
        (("bootstrap", "nobody"), 4),
        (("rollback", "echo", "nobody"), 4),
        (("deploy", "none.edgert", "gamma", "beta"), 2),
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
    code, answer = edgert("deploy", flipped, "board")
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
        code, answer = edgert("deploy", bundle, "all")
        assert (code, answer["ok"]) == (6, False)
        assert [(d["device"], d["result"], d["serving"]) for d in answer["devices"]] == [
            ("here", "live", 1),
            ("gone", "failed", None),
        ]
        assert answer["devices"][1]["error"]["code"] == "device.unreachable"
        assert edgert("deploy", bundle, "here")[1]["devices"][0]["result"] == "unchanged"
        code, asked = edgert("status")
        assert code == 6
        assert asked["devices"][0]["status"]["models"][0]["live"]["release"] == 1
        code, planned = edgert("deploy", make_null_bundle(tmp_path / "b", key, release=2), "here", "--dry-run")
        assert (code, planned["devices"][0]["result"]) == (0, "planned")
        assert planned["devices"][0]["steps"] == ["send", "install", "activate", "check", "mark-good"]
        assert planned["devices"][0]["sent_bytes"] == (tmp_path / "b" / "echo-2.edgert").stat().st_size
        # The text for people, once.
        assert main(["status", "here"]) == 0
        assert main(["device", "list"]) == 0
    finally:
        _stop(tmp_path / "dev")


@pytest.fixture
def here(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> Iterator[Path]:
    """A local device `here`, not bootstrapped yet; the folder for bundles, with the key in it."""
    key = new_key()
    write_key_pair(key, *key_paths(tmp_path / "conf" / "keys", "default"))
    assert edgert("device", "add", "here", "--local", "dev")[0] == 0
    for release in (1, 2, 3):
        make_null_bundle(tmp_path / "b", key, release=release)
    yield tmp_path / "b"
    _stop(tmp_path / "dev")


def live(edgert: Edgert) -> tuple[int, str]:
    """The live release of `echo` on `here`, and the state of its slots."""
    (model,) = edgert("status", "here")[1]["devices"][0]["status"]["models"]
    return model["live"]["release"], model["state"]


def test_rollback_goes_back_once_and_not_forward_again(edgert: Edgert, here: Path) -> None:
    for release in (1, 2):
        assert edgert("deploy", here / f"echo-{release}.edgert", "here")[0] == 0
    code, back = edgert("rollback", "echo", "here")
    assert (code, back["devices"]) == (0, [{"device": "here", "was": 2, "release": 1}])
    code, drifted = edgert("status", "here", "--check")
    (model,) = drifted["devices"][0]["models"]
    assert (code, model["live"], model["wanted"]["release"], model["drift"][0]["kind"]) == (12, 1, 2, "rolled-back")
    assert main(["status", "here"]) == 0, "only --check makes it an error"
    code, refused = edgert("rollback", "echo", "here")
    assert (code, refused["error"]["code"]) == (7, "device.transition_refused")
    assert "release 1 is live already after a rollback; deploy release 2 again" in refused["error"]["message"]
    assert live(edgert) == (1, "steady")
    assert edgert("deploy", here / "echo-2.edgert", "here")[0] == 0
    assert live(edgert) == (2, "steady")
    assert edgert("status", "here", "--check")[0] == 0
    assert edgert("rollback", "echo", "here")[1]["devices"][0]["release"] == 1
    assert edgert("rollback", "echo", "here", "--force")[1]["devices"][0]["release"] == 2


def test_bench_measures_what_is_live_and_what_may_come_and_leaves_nothing(
    edgert: Edgert, here: Path, tmp_path: Path
) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    code, live_one = edgert("bench", "echo", "here", "--for", "0.4s", "--clients", "2")
    (row,) = live_one["devices"][0]["results"]
    assert (code, live_one["devices"][0]["mode"], row["id"], row["clients"]) == (
        0,
        "as-served",
        "live: null of release 1",
        2,
    )
    assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
    assert row["per_s"] > 0
    assert row["memory_mb"] > 0
    code, both = edgert("bench", here / "echo-2.edgert", "here", "--for", "0.2s")
    assert (code, both["devices"][0]["mode"]) == (0, "engine")
    assert [one["id"] for one in both["devices"][0]["results"]] == ["null", "live: null of release 1"]
    assert all(
        {"p50_ms", "p95_ms", "p99_ms", "per_s", "memory_mb"} <= set(one) for one in both["devices"][0]["results"]
    )
    assert live(edgert) == (1, "steady")
    assert list((tmp_path / "dev" / "incoming").iterdir()) == []
    assert main(["bench", str(here / "echo-2.edgert"), "here", "--for", "0.2s"]) == 0


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


def test_a_setting_that_is_no_toml_says_how_it_is_quoted(edgert: Edgert, here: Path) -> None:
    code, answer = edgert("bootstrap", "here", "--set", "serving.cache_mb=0", "--set", "http.listen=127.0.0.1:80")
    assert code == 4
    assert """--set 'http.listen="127.0.0.1:80"'""" in answer["error"]["message"]


def test_infer_asks_a_device_and_leaves_nothing_there(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    np.save(tmp_path / "in.npy", np.ones((2, 4), np.float32))
    code, answer = edgert("infer", "echo", "--input", tmp_path / "in.npy", "here")
    assert (code, answer["outputs"]["y"]["values"]) == (0, [[1.0] * 4] * 2)
    words = ("infer", "echo", "--input", tmp_path / "in.npy", "here", "--out", tmp_path / "out.npz")
    code, answer = edgert(*words)
    assert (code, answer["outputs"]["y"]) == (0, {"shape": [2, 4], "dtype": "float32"})
    assert np.load(tmp_path / "out.npz")["y"].shape == (2, 4)
    assert list((tmp_path / "dev" / "incoming").iterdir()) == []
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07onnx")
    code, answer = edgert("infer", "echo", "--input", tmp_path / "model.onnx", "here")
    assert code == 4
    assert "pickle" not in answer["error"]["message"]
    assert "numpy.save" in answer["error"]["message"]
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0JFIF")
    code, answer = edgert("infer", "echo", "--input", tmp_path / "photo.jpg", "here")
    assert (code, answer["error"]["code"]) == (8, "request.invalid")
    assert "to send image files, build the model with --preprocess" in answer["error"]["message"]
    code, answer = edgert("infer", "nobody", "--input", tmp_path / "in.npy", "here")
    assert (code, answer["error"]["code"]) == (8, "request.model_not_found")


def test_a_deploy_beside_another_is_refused_at_once(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    device = ["--state", str(tmp_path / "dev")]
    assert edgertd([*device, "claim", "echo", "--by", "ann@desk"]) == 0
    code, refused = edgert("deploy", here / "echo-2.edgert", "here")
    assert (code, refused["error"]["code"]) == (7, "device.deploy_under_way")
    assert "another deploy of echo is under way on here (since " in refused["error"]["message"]
    assert "by ann@desk" in refused["error"]["message"]
    code, refused = edgert("rollback", "echo", "here")
    assert (code, refused["error"]["code"]) == (7, "device.deploy_under_way")
    assert live(edgert) == (1, "steady")


def interrupted_deploy(bundle: Path, presses: int) -> tuple[int, str, str]:
    """`edgert deploy` in a process of its own, interrupted while it installs: exit code, stdout, stderr."""
    program = "import sys; from edgert_deploy.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", program, "deploy", str(bundle), "here"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "deploy")])}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if line.strip() == "[here] install":
                process.send_signal(signal.SIGINT)
            if "stopping at the next step" in line:
                if presses == 2:
                    process.send_signal(signal.SIGINT)
                break
        told += process.stderr.read()
        shown = process.stdout.read()
    assert "Traceback" not in told
    return process.returncode, shown, told


def test_ctrl_c_stops_a_deployment_and_says_what_became_of_each_device(here: Path, edgert: Edgert) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    code, shown, _ = interrupted_deploy(here / "echo-2.edgert", presses=1)
    assert code == 130
    assert [line.split()[:2] for line in shown.splitlines()[1:2]] == [["here", "stopped"]]
    assert "here [deploy.interrupted]: interrupted before activate: release 2 was rolled back" in shown
    assert live(edgert) == (1, "steady")


def test_a_second_ctrl_c_lets_go_at_once_and_holds_up_no_later_deployment(here: Path, edgert: Edgert) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    code, shown, told = interrupted_deploy(here / "echo-2.edgert", presses=2)
    assert code == 130
    assert "detached: " in told
    assert [line.split()[:2] for line in shown.splitlines()[1:2]] == [["here", "abandoned"]]
    assert "ends by itself after 60 s" in shown
    assert live(edgert)[0] == 1
    # The step that was under way goes on there for a moment.
    until = time.monotonic() + 60
    while (answer := edgert("deploy", here / "echo-3.edgert", "here"))[0] != 0 and time.monotonic() < until:
        assert answer[1]["error"]["code"] == "device.slots_busy"
    assert live(edgert) == (3, "steady")


def test_an_answer_that_no_edgertd_gives_is_an_error_of_that_device(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice
) -> None:
    program = sshd.home / "edgert/venv/bin/edgertd"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho '{}'\n")
    program.chmod(0o755)
    inventory.add(sshd.device())
    code, value = edgert("status")
    assert (code, value["devices"][0]["error"]["code"]) == (7, "device.error")
    shutil.rmtree(sshd.home / "edgert")


def test_one_damaged_model_hides_no_other(edgert: Edgert, inventory: Inventory, tmp_path: Path) -> None:
    there = devices.Device(tmp_path / "there")
    there.prepare()
    for model in ("echo", "other"):
        install(there.bundle(model=model), there.state, read_config(there.state))
    folder = there.state.models / "echo"
    (folder / "state.json").write_text("{")
    state = str(there.state.root)
    inventory.add(Device("here", "local", state, "this-machine", state))
    code, value = edgert("status")
    (row,) = value["devices"]
    assert (code, {m["model"]: m["state"] for m in row["status"]["models"]}) == (
        0,
        {"echo": "damaged", "other": "first-staged"},
    )
    (damaged,) = row["models"][0]["drift"]
    assert (damaged["kind"], f"remove {folder} and deploy the model again" in damaged["text"]) == ("damaged", True)
    assert any(found.next_step.startswith(f"remove {folder}") for found in check_device(inventory.device("here"), {}))
    code, refused = edgert("deploy", there.bundle(model="echo", release=2), "here")
    assert (code, refused["devices"][0]["error"]["code"]) == (7, "device.storage_failed")
    assert not list(there.state.incoming.glob("*")), "not a byte was sent"


@pytest.mark.parametrize("become", ["", "sudo"])
def test_a_device_that_was_never_bootstrapped_is_not_called_unreachable(
    become: str, edgert: Edgert, inventory: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """sudo says in its own way, and in any language, that a command is not there."""
    sudo = tmp_path / "bin" / "sudo"
    sudo.parent.mkdir()
    sudo.write_text(
        '#!/bin/sh\nshift 2\ntest -x "$1" && exec "$@"\necho "sudo: $1: Befehl nicht gefunden" >&2\nexit 1\n'
    )
    sudo.chmod(0o755)
    with running_sshd(tmp_path / "sshd", path=f"{sudo.parent}:/usr/bin:/bin") as server:
        inventory.add(replace(server.device(), become=become))
        assert main(["status"]) == 7
    out = capfd.readouterr().out
    assert "not bootstrapped" in out.splitlines()[1]
    assert "board [device.not_bootstrapped]: EdgeRT is not set up on board: edgert bootstrap board" in out


def test_no_engine_is_no_wish(edgert: Edgert, inventory: Inventory, sshd: SshDevice) -> None:
    inventory.add(sshd.device())
    code, value = edgert("bootstrap", "board", "--engines", ",")
    assert (code, "names none" in value["error"]["message"]) == (2, True)


def test_errors_stand_below_the_table_once_and_the_next_step_is_named(
    inventory: Inventory, sshd: SshDevice, edgert: Edgert, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        "has no device yet: add one with edgert device add"
        in edgert("status", "--inventory", "none.toml")[1]["error"]["message"]
    )
    inventory.add(sshd.device("gone", port=free_port()))
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    _stop(Path("dev"))
    capfd.readouterr()
    assert main(["status"]) == 6
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["DEVICE", "here", "gone", "gone", "here:", "next:"]
    assert max(map(len, lines[:3])) < 100
    assert "gone [device.unreachable]: gone (" in lines[3]
    assert "the daemon does not run on here: edgert bootstrap here" in lines[5]
    assert main(["deploy", str(here / "echo-1.edgert"), "gone"]) == 6
    out, err = capfd.readouterr()
    assert (out + err).count("cannot be reached") == 1


def test_help_shows_an_example_for_each_command(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["device"],
        ["device", "add"],
        ["device", "set"],
        ["keys", "remove"],
        ["bootstrap"],
        ["deploy"],
        ["status"],
        ["rollback"],
        ["infer"],
    ):
        assert main([*words, "--help"]) == 0
        assert f"edgert {' '.join(words)}" in capfd.readouterr().out.partition("Example")[2], words


def _stop(state: Path) -> None:
    assert edgertd(["--state", str(state), "stop"]) == 0


def test_a_rollout_that_a_missing_device_held_up_is_shown_resumed_and_given_up(
    inventory: Inventory, sshd: SshDevice, edgert: Edgert, here: Path
) -> None:
    inventory.add(sshd.device("gone", port=free_port()))
    code, stopped = edgert("deploy", here / "echo-1.edgert", "gone,here", "--canary", "1")
    assert (code, stopped["ok"]) == (6, False)
    assert [(d["device"], d["result"]) for d in stopped["devices"]] == [("here", "live"), ("gone", "failed")]
    assert (stopped["rollout"]["state"], stopped["rollout"]["left"]) == ("stopped", ["gone"])
    name = stopped["rollout"]["id"]
    assert edgert("rollout", "status")[1]["rollout"]["id"] == name
    assert [rollout["rollout"]["id"] for rollout in edgert("rollout", "list")[1]["rollouts"]] == [name]
    edgert("device", "remove", "gone")
    code, resumed = edgert("rollout", "resume")
    assert (code, [d["result"] for d in resumed["devices"]], resumed["rollout"]["state"]) == (0, ["live"], "done")
    assert live(edgert) == (1, "steady")
    assert edgert("rollout", "abort", name)[1]["rollout"]["state"] == "done", "nothing is left to give up"
    assert edgert("rollout", "resume", "nobody")[0] == 4


def test_a_rate_that_is_none_is_refused_before_anything_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("fast", "0", "10B/s", "500KB"):
        assert main(["deploy", "none.edgert", "all", "--bwlimit", rate, "--json"]) == 2
        assert "KB/s" in json.loads(capsys.readouterr().out)["error"]["message"]
