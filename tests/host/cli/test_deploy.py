"""`edgert deploy`: a device does not delay others, Ctrl-C rolls back, and invalid bundles are refused first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.bundle.signing import new_key
from edgert.cli import main as edgertd
from edgert.errors import ConfigInvalid
from edgert.state_dir import StateDir
from edgert.versions.claims import Claims
from edgert_deploy.cli import main
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.inventory import Device as DeviceEntry
from edgert_deploy.devices.inventory import Inventory
from hil.support.sshd import SshDevice, running_sshd
from tests.support.bundles import flip_bit, make_null_bundle
from tests.support.commands import Edgert, live, own_key, stop
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until
from tests.support.paths import ROOT
from tests.support.servers.ports import free_port


class SlowInstall:
    """A device `here` on which every installation waits until the test continues it."""

    def __init__(self, there: Device, server: SshDevice) -> None:
        self.there, self._gate = there, server.folder / "gate"
        os.mkfifo(self._gate)
        program = server.home / "edgert/venv/bin/edgertd"
        program.parent.mkdir(parents=True)
        program.write_text(
            f'#!/bin/sh\ncase " $* " in *" install "*) echo waiting >&2; read line <"{self._gate}";; esac\n'
            f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m edgert.cli "$@"\n'
        )
        program.chmod(0o755)

    def go_on(self) -> None:
        """Continue the waiting installation."""
        self._gate.write_text("\n")

    def wait_no_more(self) -> None:
        """Continue every later installation at once."""
        self._gate.unlink()
        self.go_on()

    def interrupted_deploy(self, bundle: Path, presses: int) -> tuple[int, str, str]:
        """Deploy in a separate process. Interrupt the installation. Return exit code, stdout and stderr."""
        words = [sys.executable, "-m", "edgert_deploy.cli", "deploy", str(bundle), "here"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "deploy")])}
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            told = ""
            try:
                for line in process.stderr:
                    told += line
                    if line.strip() == "[here] waiting":
                        process.send_signal(signal.SIGINT)
                    if "stopping: unfinished devices" in line:
                        break
                if presses == 1:
                    self.go_on()
                else:
                    process.send_signal(signal.SIGINT)
                shown, rest = process.communicate(timeout=WAIT_S_MAX)
                told += rest
            finally:
                process.kill()  # if the process still runs, Popen would wait for ever
        assert "Traceback" not in told
        return process.returncode, shown, told


@pytest.fixture
def slow(inventory: Inventory, tmp_path: Path) -> Iterator[SlowInstall]:
    with a_device() as there, running_sshd(tmp_path / "sshd") as server:
        there.put()
        inventory.add(replace(server.device("here"), state=str(there.state.root)))
        yield SlowInstall(there, server)


def test_a_damaged_bundle_is_refused_before_a_device_is_asked(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice, tmp_path: Path
) -> None:
    """The device is unreachable: an attempt to connect would give another error."""
    inventory.add(sshd.device(port=free_port()))
    flipped = flip_bit(make_null_bundle(tmp_path / "b", new_key(), padding_bytes=5000), -3000)
    code, answer = edgert("deploy", flipped, "board")
    assert (code, answer["error"]["code"]) == (5, "bundle.corrupt")


def test_a_device_that_does_not_answer_does_not_delay_the_others(
    edgert: Edgert, inventory: Inventory, sshd: SshDevice, tmp_path: Path
) -> None:
    key = own_key(tmp_path)
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
        # This run prints the text for people.
        assert main(["status", "here"]) == 0
        assert main(["device", "list"]) == 0
    finally:
        stop(tmp_path / "dev")


def test_a_release_that_was_trained_worse_does_not_go_live_silently(
    edgert: Edgert, inventory: Inventory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = own_key(tmp_path)
    edgert("device", "add", "here", "--local", "dev")
    bundles = [make_null_bundle(tmp_path / "b", key, release=r, score=s) for r, s in ((1, 0.99), (2, 0.93), (3, 0.97))]
    told = "release 2 of echo scored 0.9300 at its build (top1, 2 samples); release 1, live before, scored 0.9900"
    try:
        assert edgert("deploy", bundles[0], "here")[1]["devices"][0]["warning"] == ""
        assert told in edgert("deploy", bundles[1], "here", "--dry-run")[1]["devices"][0]["warning"]
        assert main(["deploy", str(bundles[1]), "here"]) == 0
        out, err = capfd.readouterr()
        assert f"warning: {told}" in err.partition("send")[0], "before anything is sent"
        assert f"warning: {told} (2 samples): here\n" in out
        assert "edgert rollback echo DEVICE rolls it back" in out
        assert told in edgert("rollout", "status")[1]["devices"][0]["warning"], "the record has it"
        assert edgert("deploy", bundles[2], "here")[1]["devices"][0]["warning"] == ""
        slot = tmp_path / "dev" / "models" / "echo"
        for envelope in slot.glob("*/manifest.dsse.json"):
            envelope.write_bytes(b"damaged")
        assert edgert("status", "here")[0] == 0, "a slot that cannot be read takes only the warning"
    finally:
        stop(tmp_path / "dev")


def test_a_deployment_is_refused_at_once_while_another_runs(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    device = ["--state", str(tmp_path / "dev")]
    assert edgertd([*device, "claim", "echo", "--by", "ann@desk"]) == 0
    code, refused = edgert("deploy", here / "echo-2.edgert", "here")
    assert (code, refused["error"]["code"]) == (7, "device.deploy_under_way")
    assert "another deployment of echo is in progress on here (since " in refused["error"]["message"]
    assert "by ann@desk" in refused["error"]["message"]
    code, refused = edgert("rollback", "echo", "here")
    assert (code, refused["error"]["code"]) == (7, "device.deploy_under_way")
    assert live(edgert) == (1, "steady")


def test_a_deployment_during_a_trial_is_refused_with_the_next_step(edgert: Edgert, here: Path, tmp_path: Path) -> None:
    assert edgert("deploy", here / "echo-1.edgert", "here")[0] == 0
    device = ["--state", str(tmp_path / "dev")]
    assert edgertd([*device, "install", str(here / "echo-2.edgert")]) == 0
    assert edgertd([*device, "activate", "echo"]) == 0
    token = Claims(StateDir(tmp_path / "dev"), "here").acquire("echo", "ann@desk", 600).token
    code, answer = edgert("deploy", here / "echo-3.edgert", "here")
    refused = answer["devices"][0]["error"] if code == 7 and "devices" in answer else answer["error"]
    assert (refused["code"], "by ann@desk" in refused["message"]) == ("device.deploy_under_way", True)
    assert "rollback" not in refused["message"]
    assert edgert("rollback", "echo", "here")[0] == 7
    Claims(StateDir(tmp_path / "dev"), "here").release(token)
    code, answer = edgert("deploy", here / "echo-3.edgert", "here")
    assert "end the trial with: edgert rollback echo here" in json.dumps(answer)
    assert edgert("rollback", "echo", "here")[0] == 0
    assert edgert("deploy", here / "echo-3.edgert", "here")[0] == 0


def test_ctrl_c_stops_a_deployment_and_reports_the_result_of_each_device(
    slow: SlowInstall, edgert: Edgert, capfd: pytest.CaptureFixture[str]
) -> None:
    code, shown, _ = slow.interrupted_deploy(slow.there.bundle(release=2), presses=1)
    assert code == 130
    assert [line.split()[:2] for line in shown.splitlines()[1:2]] == [["here", "stopped"]]
    assert "here [deploy.interrupted]: interrupted before activate: release 2 was rolled back" in shown
    assert live(edgert) == (1, "steady")
    capfd.readouterr()
    assert main(["status"]) == 0
    assert re.search(
        r"^next: rollout (echo-r2-\S+) was interrupted on here: edgert rollout resume \1 ",
        capfd.readouterr().out,
        re.MULTILINE,
    )


def test_a_second_ctrl_c_detaches_at_once_and_does_not_delay_a_later_deployment(
    slow: SlowInstall, edgert: Edgert
) -> None:
    code, shown, told = slow.interrupted_deploy(slow.there.bundle(release=2), presses=2)
    assert code == 130
    assert "detached: " in told
    assert [line.split()[:2] for line in shown.splitlines()[1:2]] == [["here", "abandoned"]]
    assert "ends by itself after 60 s" in shown
    assert live(edgert) == (1, "steady")
    slow.go_on()
    slow.wait_no_more()

    def deployed() -> bool:  # the current step may continue on the device for a moment
        code, answer = edgert("deploy", slow.there.bundle(release=3), "here")
        assert code == 0 or answer["error"]["code"] == "device.slots_busy"
        return code == 0

    wait_until(deployed, "a later deployment is not held up")
    assert live(edgert) == (3, "steady")


def test_names_of_devices_after_spaces_are_refused_with_the_right_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "digits.edgert"
    bundle.touch()
    assert main(["deploy", str(bundle), "pi-1", "pi-2"]) == 2
    assert "extra argument (pi-2). Separate several devices by commas: pi-1,pi-2" in capsys.readouterr().err


def test_the_value_of_the_option_canary_is_a_number_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "none.edgert", "all", "--canary", "line-1", "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "'line-1' is not a number of devices. To choose the devices, deploy to them first" in message


def test_an_invalid_rate_is_refused_before_anything_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    for rate in ("fast", "0", "10B/s", "500KB"):
        assert main(["deploy", "none.edgert", "all", "--bwlimit", rate, "--json"]) == 2
        assert "KB/s" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_no_rollout_is_recorded_if_this_host_cannot_write_its_cache(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inventory.add(DeviceEntry("here", "local", str(tmp_path / "state"), "this-machine", str(tmp_path / "state")))
    bundle = make_null_bundle(tmp_path / "b", new_key())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["deploy", str(bundle), "here"]) == ConfigInvalid.exit_code
    assert "set XDG_CACHE_HOME to a folder of yours" in capfd.readouterr().err
    assert not list(find_project().rollouts.glob("*"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["deploy", str(bundle), "here"]) == ConfigInvalid.exit_code, "it would bootstrap, and has no key"
    (record,) = find_project().rollouts.glob("*.jsonl")
    lines = record.read_text()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    capfd.readouterr()
    assert main(["rollout", "resume"]) == ConfigInvalid.exit_code
    assert "set XDG_CACHE_HOME to a folder of yours" in capfd.readouterr().err
    assert record.read_text() == lines
