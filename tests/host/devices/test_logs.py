"""`edgert logs` and `edgert ssh` with a real OpenSSH server: right lines, pinned keys, and no remaining process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid, DeviceError
from edgert_deploy.cli import main
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.logs import LogRequest, following, parse_since, read_log
from edgert_deploy.devices.transports import open_transport
from hil.support.keys import new_ssh_key
from hil.support.sshd import SshDevice, running_sshd, start_sshd
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.paths import ROOT

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        server.state.mkdir()
        yield server


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sshd: SshDevice) -> Inventory:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    inventory = Inventory(tmp_path / "conf" / "inventory.toml")
    inventory.add(sshd.device())
    return inventory


def stamped(ago_s: float, text: str) -> str:
    return f"{datetime.now(timezone.utc) - timedelta(seconds=ago_s):%Y-%m-%dT%H:%M:%SZ} {text}"


@pytest.fixture
def log(sshd: SshDevice) -> Path:
    lines = [stamped(7200, "model echo: loaded"), stamped(7100, "model echo-2: loaded")]
    lines += [stamped(100, "model echo: a fault"), "Traceback of it", stamped(50, "telemetry: connected")]
    path = sshd.state / "edgertd.log"
    path.write_text("\n".join((*lines, "")))
    return path


def read(device: Device, request: LogRequest) -> list[str]:
    transport = open_transport(device)
    try:
        return [line.partition("Z ")[2] or line for line in read_log(transport, device, request)]
    finally:
        transport.close()


def test_only_the_requested_lines_are_read(sshd: SshDevice, log: Path) -> None:
    device = sshd.device()
    assert len(read(device, LogRequest())) == 5
    assert read(device, LogRequest(lines=2)) == ["Traceback of it", "telemetry: connected"]
    assert read(device, LogRequest(since="-600")) == ["model echo: a fault", "Traceback of it", "telemetry: connected"]
    assert read(device, LogRequest(lines=1, model="echo")) == ["model echo: a fault"]
    assert read(device, LogRequest(model="echo", since="-600")) == ["model echo: a fault"]
    assert read(device, LogRequest(since=parse_since("2100-01-01"))) == []
    local = Device("here", "local", str(sshd.state), "this-machine", str(sshd.state))
    assert len(read(local, LogRequest())) == 5


@pytest.mark.parametrize(
    ("text", "since"),
    [("90s", "-90"), ("10m", "-600"), ("2h", "-7200"), ("1d", "-86400"), ("2026-11-21T12:00", "@1795262400")],
)
def test_valid_times_are_read(text: str, since: str) -> None:
    assert parse_since(text) == since
    assert parse_since("2026-11-21T13:00+01:00") == parse_since("2026-11-21T12:00Z") == f"@{int(NOW.timestamp())}"


@pytest.mark.parametrize("text", ["yesterday", "10", "-5m", "$(reboot)", ""])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="--since"):
        parse_since(text)


def test_a_device_without_a_log_is_reported(sshd: SshDevice, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="edgert bootstrap board"):
        read(replace(sshd.device(), state=str(tmp_path)), LogRequest())


def test_lines_are_followed_and_no_process_stays_on_the_device(sshd: SshDevice, log: Path) -> None:
    for device in (sshd.device(), Device("here", "local", str(sshd.state), "this-machine", str(sshd.state))):
        with following(device, LogRequest(lines=1, model="echo")) as lines:
            with log.open("a") as file:
                file.write(stamped(0, "model other: no\n") + stamped(0, "model echo: new\n"))
            assert next(line for line in lines).endswith("model echo: new")
            assert _tails(log)
        wait_until(lambda: not _tails(log), "the follower there ends with the connection")


def test_following_a_log_does_not_depend_on_the_ssh_configuration_of_the_user(
    sshd: SshDevice, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In older versions, a terminal echoed input, tunnel settings ran no command, and a used port ended ssh."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        forward = f"LocalForward {held.getsockname()[1]} localhost:1\n ExitOnForwardFailure yes"
        lines = f"RequestTTY force\n SessionType none\n StdinNull yes\n ForkAfterAuthentication yes\n {forward}"
        use_ssh_configuration(f"Host *\n {lines}\n", tmp_path, monkeypatch)
        with following(sshd.device(), LogRequest(lines=1)) as found:
            assert next(found).endswith("Z telemetry: connected")
            with log.open("a") as file:
                file.write("new\n")
            assert next(found) == "new"
    wait_until(lambda: not _tails(log), "the follower there ends with the connection")


def use_ssh_configuration(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system's ssh read `text`. ssh does not take the home folder from the environment."""
    (folder / "config").write_text(text)
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_ctrl_c_ends_the_command_that_follows_a_log_with_0(inventory: Inventory, sshd: SshDevice, log: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "deploy")])}
    words = [sys.executable, "-m", "edgert_deploy.cli", "logs", "board", "-f", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline())["line"] for _ in range(5)]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=WAIT_S_MAX)
    assert lines[-1].endswith("telemetry: connected")
    assert (process.returncode, "Traceback" in said) == (0, False), said
    wait_until(lambda: not _tails(log), "the follower there ends with the connection")


def _tails(log: Path) -> bool:
    found = subprocess.run(["pgrep", "-f", f"^tail .*{log}"], stdout=subprocess.DEVNULL, check=False)
    return found.returncode == 0


# --- edgert ssh -------------------------------------------------------------------------------


def test_a_command_runs_on_the_device_and_its_exit_code_is_returned(
    inventory: Inventory, sshd: SshDevice, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["ssh", "board", "--", "echo", "$HOME;", "exit", "7"]) == 7
    assert capfd.readouterr().out == f"{sshd.home}\n"
    assert main(["ssh", "board", "true"]) == 0
    assert main(["ssh", "nobody"]) == 4
    inventory.add(Device("here", "local", str(sshd.state), "this-machine", str(sshd.state)))
    assert main(["ssh", "here", "--", "exit 3"]) == 3


def test_a_remote_command_of_the_users_configuration_is_ignored(
    inventory: Inventory,
    sshd: SshDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    use_ssh_configuration("Host *\n RemoteCommand tmux new -A\n SessionType none\n", tmp_path, monkeypatch)
    assert main(["ssh", "board", "--", "echo in"]) == 0
    assert capfd.readouterr().out == "in\n"


def test_the_command_ssh_uses_the_pinned_keys_of_the_device_and_of_the_jump_host(
    inventory: Inventory, sshd: SshDevice, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "a key %h"
    shutil.copy(sshd.client_key, odd)
    with running_sshd(tmp_path / "bastion") as bastion:
        shutil.copy(sshd.folder / "client_key.pub", bastion.folder / "authorized_keys")
        behind = replace(sshd.device("behind"), jump=bastion.address, jump_host_key=bastion.host_key, identity=str(odd))
        inventory.add(behind)
        inventory.add(replace(behind, name="other-device", host_key=bastion.host_key))
        inventory.add(replace(behind, name="other-jump", jump_host_key=sshd.host_key))
        assert main(["ssh", "behind", "--", "echo in"]) == 0
        assert capfd.readouterr().out == "in\n"
        accepted = bastion.log.count("Accepted publickey")
        assert accepted == 1
        reached = sshd.log.count("Accepted publickey")
        assert main(["ssh", "other-jump", "--", "echo in"]) == 255
        assert bastion.log.count("Accepted publickey") == accepted
        assert main(["ssh", "other-device", "--", "echo in"]) == 255
        assert sshd.log.count("Accepted publickey") == reached
        out, err = capfd.readouterr()
        assert out == ""
        assert "Host key verification failed" in err


def test_an_impostor_does_not_learn_the_user_name(inventory: Inventory, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "sshd") as server:
        inventory.add(server.device("moved"))
        server.stop()
        new_ssh_key(server.folder / "host_key")
        (server.folder / "log").write_text("")
        impostor = start_sshd(server.folder, port=server.port)
        try:
            assert main(["ssh", "moved", "--", "true"]) == 255
            assert f"user {server.address.partition('@')[0]}" not in impostor.log
        finally:
            impostor.stop()
