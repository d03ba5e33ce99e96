"""The doctor finds what is wrong on a real daemon and behind a real sshd, and names the next step."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import new_key, write_key_pair
from edgert.telemetry.broker_connection import CONNECTED, REFUSED, read_broker_connection
from edgert.telemetry.mqtt import BrokerRefused
from edgert_deploy.cli import main
from edgert_deploy.common.keys import key_paths
from edgert_deploy.devices.facts import probe
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.doctor import FAIL, OK, WARN
from edgert_deploy.doctor import device as device_checks
from edgert_deploy.doctor.device import check_device, clock_skew_s, crontab_line
from hil.support.keys import new_ssh_key
from hil.support.sshd import SshDevice, running_sshd
from tests.support import devices
from tests.support.devices import a_device, wait_until
from tests.support.findings import levels, text_of
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")


def as_known(device: devices.Device, **changes: Any) -> Device:
    state = str(device.state.root)
    return replace(Device("d-test", "local", state, "this-machine", state), **changes)


def test_a_complete_device_passes_all_checks(inventory: Inventory, daemon: devices.Device) -> None:
    found = check_device(as_known(daemon), {daemon.key.public.key_id: "test"})
    assert {finding.level for finding in found} == {OK}, [f for f in found if f.level != OK]
    checks = {finding.check for finding in found}
    assert checks >= {"reachable", "python", "glibc", "memory", "clock", "disk", "installed", "daemon", "socket"}
    assert checks >= {"engine", "keys", "telemetry", "model"}


def test_a_sudo_that_asks_for_a_password_gets_its_own_next_step(inventory: Inventory, tmp_path: Path) -> None:
    sudo = tmp_path / "bin" / "sudo"
    sudo.parent.mkdir()
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2; exit 1\n")
    sudo.chmod(0o755)
    with running_sshd(tmp_path / "sshd", path=f"{sudo.parent}:/usr/bin:/bin") as server:
        (found,) = check_device(replace(server.device(), become="sudo"), {})
    assert found.text.endswith("a password is required (exit code 1)")
    assert found.next_step.startswith("Allow this user sudo without a password")


@pytest.mark.parametrize(
    ("vnni", "text"), [(True, "x86_64"), (False, "x86_64 without VNNI: INT8 is about as fast as FP32")]
)
def test_a_processor_without_fast_int8_is_reported(
    inventory: Inventory, daemon: devices.Device, monkeypatch: pytest.MonkeyPatch, *, vnni: bool, text: str
) -> None:
    monkeypatch.setattr(device_checks, "probe", lambda *how: replace(probe(*how), machine="x86_64", vnni=vnni))
    found = check_device(as_known(daemon), {daemon.key.public.key_id: "test"})
    assert [finding.text for finding in found if finding.check == "processor"] == [text]


def test_a_fault_of_a_device_is_reported_with_its_next_step(inventory: Inventory, daemon: devices.Device) -> None:
    ours = {daemon.key.public.key_id: "test"}
    other = replace(as_known(daemon), profile="raspberry-pi-3", site="elsewhere")
    found = check_device(other, {"0123": "default"}, clock=lambda: time.time() + 1000)
    assert levels(found, "processor") == [FAIL]
    assert "edgert device probe d-test" in text_of(found, "processor")
    assert levels(found, "clock") == [FAIL]
    assert "s behind this host" in text_of(found, "clock")
    assert levels(found, "installed") == [OK, WARN, WARN]
    assert levels(found, "keys") == [FAIL]
    stranger = new_key().public
    (daemon.state.keys / "stranger.pem").write_bytes(stranger.pem())
    mode = daemon.socket.stat().st_mode
    daemon.socket.chmod(0o777)
    try:
        found = check_device(replace(as_known(daemon), profile="none-such"), ours, clock=lambda: time.time() - 150)
        assert levels(found, "clock") == [WARN]
        assert "s ahead of this host" in text_of(found, "clock")
        assert levels(found, "profile") == [FAIL]
        assert levels(found, "keys") == [WARN]
        assert f"edgert keys remove {stranger.key_id} d-test" in text_of(found, "keys")
        assert levels(found, "socket") == [WARN]
    finally:
        daemon.socket.chmod(mode)
        (daemon.state.keys / "stranger.pem").unlink()


def test_a_stopped_daemon_and_a_device_without_a_daemon_are_reported(inventory: Inventory, tmp_path: Path) -> None:
    with a_device(started=False) as device:
        found = check_device(as_known(device), {device.key.public.key_id: "test"})
        assert levels(found, "daemon") == [FAIL]
        assert "edgert logs d-test" in text_of(found, "daemon")
    bare = Device("bare", "local", str(tmp_path / "none"), "this-machine", str(tmp_path / "none"))
    found = check_device(bare, {})
    assert levels(found, "installed") == [FAIL]
    assert [f.next_step for f in found if f.check == "installed"] == ["edgert bootstrap bare"]
    assert not (tmp_path / "none").exists()


def test_a_daemon_that_hangs_is_reported_without_the_advice_to_bootstrap(inventory: Inventory) -> None:
    with a_device() as device:
        pid = device.daemon_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            found = check_device(as_known(device), {device.key.public.key_id: "test"})
        finally:
            os.kill(pid, signal.SIGCONT)
    assert levels(found, "daemon") == [FAIL]
    assert "edgert logs d-test" in text_of(found, "daemon")
    assert not any("bootstrap" in finding.next_step for finding in found if finding.level == FAIL)


def test_the_error_about_a_configuration_says_to_correct_the_file(tmp_path: Path) -> None:
    with a_device(started=False) as device:
        with device.state.config.open("a") as file:
            file.write("\n[models.digits]\nneer = 0.02\n")
        (found,) = [f for f in check_device(as_known(device), {}) if f.check == "configuration"]
    assert (found.level, found.exit_code, found.next_step) == (FAIL, 7, "correct this file")
    assert "unknown key 'neer'" in found.text


def test_the_error_about_http_without_its_package_names_the_command_that_installs_it(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_device('[http]\nlisten = "127.0.0.1:0"\n', started=False) as device:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")  # Python searches this folder first
        (tmp_path / "httptools.py").write_text("raise ImportError('not here')\n")
        assert "edgert bootstrap d-test --upgrade" in device.run("status")["http"]["fault"]
        found = check_device(as_known(device), {})
        assert levels(found, "http") == [FAIL]
        assert "-m pip install 'edgert[http]'" in text_of(found, "http")
        (tmp_path / "httptools.py").unlink()
        device.state.config.write_text(device.state.config.read_text().replace("127.0.0.1:0", "0.0.0.0:80"))
        assert "edgert bootstrap d-test --set 'http.listen=" in text_of(check_device(as_known(device), {}), "http")


def test_the_state_of_telemetry_is_the_state_that_the_forwarder_reports(inventory: Inventory, tmp_path: Path) -> None:
    broker = Broker.in_folder(tmp_path / "broker")
    with broker, a_device(f'[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n') as device:
        spool = device.state.spool.parent
        wait_until(lambda: read_broker_connection(spool).state == CONNECTED, "it connects")
        assert levels(check_device(as_known(device), {}), "telemetry") == [OK]
        broker.stop()
        wait_until(lambda: read_broker_connection(spool).state != CONNECTED, "it notices")
        found = check_device(as_known(device), {})
        assert levels(found, "telemetry") == [WARN]
        assert f"127.0.0.1:{broker.port}" in text_of(found, "telemetry")


def test_the_next_step_for_a_broker_that_refuses_the_login_is_to_set_the_login(
    inventory: Inventory, tmp_path: Path
) -> None:
    broker = Broker.in_folder(tmp_path / "broker", secured=True)
    settings = f'[mqtt]\nhost = "localhost"\nport = {broker.port}\ntls = true\nca = "{broker.folder}/ca.pem"\n'
    with broker, a_device(settings) as device:
        spool = device.state.spool.parent
        wait_until(lambda: read_broker_connection(spool).state == BrokerRefused.code, "the broker refuses the login")
        found = check_device(as_known(device), {})
    assert "edgert bootstrap d-test --mqtt-username USER" in text_of(found, "telemetry")


def test_a_broker_that_refuses_the_reports_is_reported(inventory: Inventory, tmp_path: Path) -> None:
    access = tmp_path / "access"
    access.write_text("topic read edgert/v1/#\n")  # a login for people may print such a line
    broker = Broker.in_folder(tmp_path / "broker", extra=(f"acl_file {access}",))
    with broker, a_device(f'[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n') as device:
        wait_until(
            lambda: read_broker_connection(device.state.spool.parent).state == REFUSED, "the broker refuses a message"
        )
        found = check_device(as_known(device), {})
    assert levels(found, "telemetry") == [WARN]
    assert "let this user write" in text_of(found, "telemetry")
    assert "edgert bootstrap d-test --mqtt-username USER" in text_of(found, "telemetry")


def test_a_registry_that_a_follower_cannot_reach_is_reported_with_the_next_step(inventory: Inventory) -> None:
    registry = f"oci+http://127.0.0.1:{free_port()}/models"
    with a_device(f'[follow]\nregistry = "{registry}"\n', started=False) as device:
        assert "not requested yet" in text_of(check_device(as_known(device), {}), "channel")
        device.run("follow", code=6)
        found = check_device(as_known(device), {})
    assert levels(found, "channel") == [WARN]
    assert f"edgert bootstrap d-test --follow {registry} --channel stable" in text_of(found, "channel")


def test_faults_of_the_connection_are_reported_with_their_next_steps(
    inventory: Inventory, sshd: SshDevice, tmp_path: Path
) -> None:
    new_ssh_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    unreachable = check_device(sshd.device(port=free_port()), {})
    changed = check_device(sshd.device(host_key=other), {})
    stranger = check_device(replace(sshd.device(), identity=str(tmp_path / "other")), {})
    locked = tmp_path / "locked"
    shutil.copy(tmp_path / "other", locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", locked], check=True, capture_output=True)
    closed = check_device(replace(sshd.device(), identity=str(locked)), {})
    assert closed[0].next_step == "Give the key's passphrase to an agent (ssh-add)"
    assert "ssh-add" not in closed[0].text
    jump, key = sshd.address.replace("127.0.0.1", "localhost"), sshd.host_key
    refused_jump = replace(sshd.device(), identity=str(tmp_path / "other"), jump=jump, jump_host_key=key)
    changed_jump = replace(refused_jump, jump_host_key=other)
    for found, check, mend in (
        (check_device(refused_jump, {}), "login", f"ssh-copy-id -p {sshd.port} {jump.partition(':')[0]}, or"),
        (check_device(changed_jump, {}), "host key", "edgert device set board --jump localhost"),
        (closed, "login", "ssh-add"),
        (unreachable, "reachable", "--address"),
        (changed, "host key", "edgert device set board --repin"),
        (stranger, "login", f"ssh-copy-id -p {sshd.port} {sshd.address.partition(':')[0]}, or"),
    ):
        assert [(f.check, f.level, f.exit_code) for f in found] == [(check, FAIL, 6)]
        assert mend in text_of(found, check)
    found = check_device(sshd.device(), {})
    assert levels(found, "reachable") == [OK]
    assert levels(found, "installed") == [FAIL]


def test_a_silent_device_does_not_delay_the_checks_of_others(
    inventory: Inventory, sshd: SshDevice, daemon: devices.Device, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_key_pair(daemon.key, *key_paths(tmp_path / "conf" / "keys", "fleet"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        inventory.add(sshd.device("silent", port=silent.getsockname()[1]))
        inventory.add(as_known(daemon))
        capfd.readouterr()
        assert main(["doctor", "--json"]) == 6
        value = json.loads(capfd.readouterr().out)
    failed = [(one["where"], one["check"]) for one in value["findings"] if one["level"] == FAIL]
    assert (value["ok"], failed) == (False, [("silent", "reachable")])
    assert {one["check"] for one in value["findings"] if one["where"] == "d-test"} >= {"daemon", "model"}
    assert main(["doctor", "d-test", "--quiet"]) == 0
    shown = capfd.readouterr().out
    assert "no key in an agent" in shown
    assert "  ok    " not in shown


@pytest.mark.parametrize(
    ("now", "before", "after", "skew"),
    [
        (100, 100.2, 100.3, 0.0),
        (100, 99.5, 100.1, 0.0),
        (100, 90.0, 130.0, 0.0),  # a slow link or a busy device
        (100, 1101.0, 1102.0, -1000.0),
        (100, 1101.0, 1130.0, -1000.0),
        (100, 79.0, 80.0, 20.0),
        (100, 50.0, 80.0, 20.0),
    ],
)
def test_the_duration_of_the_request_does_not_count_as_skew_of_the_clock(
    now: int, before: float, after: float, skew: float
) -> None:
    assert clock_skew_s(now, before, after) == skew


def test_the_line_for_cron_is_valid_for_every_folder_name() -> None:
    device = Device("board", "ssh", "pi@board", "p", "/srv/my state", home="/srv/100%")
    assert crontab_line(device) == r"@reboot sh /srv/100\%/runtime.sh start '/srv/my state'"
