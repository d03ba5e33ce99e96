"""The doctor finds what is wrong on a real host, a real daemon and a real sshd, names what mends it, and changes nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.bundle.signing import new_key, write_key_pair
from edgert.telemetry.link import CONNECTED, read_link
from edgert_deploy.cli import main
from edgert_deploy.common.keys import key_paths
from edgert_deploy.common.project import BrokerDefaults, Project
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.doctor import FAIL, OK, WARN, Finding
from edgert_deploy.doctor.device import check_device
from edgert_deploy.doctor.host import check_host, signing_keys
from hil.keys import new_ssh_key
from hil.sshd import SshDevice, free_port, running_sshd
from tests.support import devices
from tests.support.brokers import Broker
from tests.support.devices import a_device, wait_until


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """An empty fleet and a signing key, in a configuration of the test's own; no agent, no ~/.ssh."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGERT_CONFIG_DIR", str(tmp_path / "conf"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    write_key_pair(new_key(), *key_paths(tmp_path / "conf" / "keys", "default"))
    return Inventory(tmp_path / "conf" / "inventory.toml")


@pytest.fixture(scope="module")
def daemon() -> Iterator[devices.Device]:
    with a_device() as device:
        device.deploy()
        yield device


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshDevice]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def as_known(device: devices.Device, **changes: Any) -> Device:
    state = str(device.state.root)
    return replace(Device("d-test", "local", state, "this-machine", state), **changes)


def levels(findings: list[Finding], check: str) -> list[str]:
    for finding in findings:
        assert (finding.mend == "") == (finding.level == OK), finding
        assert (finding.exit_code == 0) == (finding.level != FAIL), finding
    return [finding.level for finding in findings if finding.check == check]


def says(findings: list[Finding], check: str) -> str:
    return " ".join(f"{finding.says} {finding.mend}" for finding in findings if finding.check == check)


def test_a_host_that_lacks_nothing(inventory: Inventory, tmp_path: Path) -> None:
    inventory.add(Device("here", "local", "/srv/x", "this-machine", "/srv/x"))
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    new_ssh_key(tmp_path / "home" / ".ssh" / "id_ed25519")
    found = check_host(inventory)
    assert [f for f in found if f.level != OK and f.check != "room"] == []  # the room is this machine's own
    assert list(signing_keys().values()) == ["default"]


def test_what_is_wrong_on_the_host_is_named_with_its_mend(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_paths(tmp_path / "conf" / "keys", "default")
    private.chmod(0o644)
    assert f"chmod 600 {private}" in says(check_host(inventory), "signing key")
    private.chmod(0o600)
    write_key_pair(new_key(), *key_paths(tmp_path / "conf" / "keys", "other"))
    public.write_bytes(key_paths(tmp_path / "conf" / "keys", "other")[1].read_bytes())
    assert "do not belong together" in says(check_host(inventory), "signing key")
    private.write_text("no key")
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    (tmp_path / "home" / ".ssh" / "config").write_text("Include config\n")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "nobody"))
    inventory.path.write_text("[devices.X]\n")
    found = check_host(inventory)
    assert levels(found, "signing key") == [FAIL, OK]
    assert levels(found, "inventory") == [FAIL]
    assert "includes more than" in says(found, "ssh")
    assert "ssh-add" in says(found, "ssh")
    inventory.path.write_text("")
    inventory.add(replace(Device("a", "local", "/srv/x", "p", "/srv/x"), identity=str(tmp_path / "none")))
    assert "edgert device set a --identity" in says(check_host(inventory), "inventory")


def test_the_projects_broker_is_logged_in_to(inventory: Inventory, tmp_path: Path) -> None:
    with Broker.in_folder(tmp_path / "broker") as broker:
        named = BrokerDefaults(f"127.0.0.1:{broker.port}")
        assert levels(check_host(inventory, Project(tmp_path, inventory.path, broker=named)), "broker") == [OK]
    found = check_host(inventory, Project(tmp_path, inventory.path, broker=named))
    assert levels(found, "broker") == [FAIL]
    assert [f.exit_code for f in found if f.check == "broker"] == [6]


def test_a_device_that_lacks_nothing(inventory: Inventory, daemon: devices.Device) -> None:
    found = check_device(as_known(daemon), {daemon.key.public.key_id: "test"})
    assert {finding.level for finding in found} == {OK}, [f for f in found if f.level != OK]
    checks = {finding.check for finding in found}
    assert checks >= {"reachable", "python", "glibc", "memory", "clock", "room", "installed", "daemon", "socket"}
    assert checks >= {"engine", "keys", "telemetry", "model"}


def test_what_is_wrong_on_a_device_is_named_with_its_mend(inventory: Inventory, daemon: devices.Device) -> None:
    ours = {daemon.key.public.key_id: "test"}
    other = replace(as_known(daemon), profile="raspberry-pi-3", site="elsewhere")
    found = check_device(other, {"0123": "default"}, clock=lambda: time.time() + 1000)
    assert levels(found, "processor") == [FAIL]
    assert "edgert device probe d-test" in says(found, "processor")
    assert levels(found, "clock") == [FAIL]
    assert "1000 s behind" in says(found, "clock") or "999 s behind" in says(found, "clock")
    assert levels(found, "installed") == [OK, WARN, WARN]
    assert levels(found, "keys") == [FAIL]
    stranger = new_key().public
    (daemon.state.keys / "stranger.pem").write_bytes(stranger.pem())
    mode = daemon.socket.stat().st_mode
    daemon.socket.chmod(0o777)
    try:
        found = check_device(replace(as_known(daemon), profile="none-such"), ours, clock=lambda: time.time() - 20)
        assert levels(found, "clock") == [WARN]
        assert "20 s ahead" in says(found, "clock") or "19 s ahead" in says(found, "clock")
        assert levels(found, "profile") == [FAIL]
        assert levels(found, "keys") == [WARN]
        assert f"edgert keys remove {stranger.key_id} d-test" in says(found, "keys")
        assert levels(found, "socket") == [WARN]
    finally:
        daemon.socket.chmod(mode)
        (daemon.state.keys / "stranger.pem").unlink()


def test_a_daemon_that_does_not_run_and_a_device_without_one(inventory: Inventory, tmp_path: Path) -> None:
    with a_device(started=False) as device:
        found = check_device(as_known(device), {device.key.public.key_id: "test"})
        assert levels(found, "daemon") == [FAIL]
        assert "edgert logs d-test" in says(found, "daemon")
    bare = Device("bare", "local", str(tmp_path / "none"), "this-machine", str(tmp_path / "none"))
    found = check_device(bare, {})
    assert levels(found, "installed") == [FAIL]
    assert [f.mend for f in found if f.check == "installed"] == ["edgert bootstrap bare"]
    assert not (tmp_path / "none").exists()


def test_http_that_lacks_its_package_is_named_with_what_brings_it(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_device('[http]\nlisten = "127.0.0.1:0"\n', started=False) as device:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # where Python looks first
        (tmp_path / "httptools.py").write_text("raise ImportError('not here')\n")
        assert "edgert bootstrap d-test --upgrade" in device.run("status")["http"]["fault"]
        found = check_device(as_known(device), {})
        assert levels(found, "http") == [FAIL]
        assert "-m pip install 'edgert[http]'" in says(found, "http")
        (tmp_path / "httptools.py").unlink()
        device.state.config.write_text(device.state.config.read_text().replace("127.0.0.1:0", "0.0.0.0:80"))
        assert "edgert bootstrap d-test --set 'http.listen=" in says(check_device(as_known(device), {}), "http")


def test_telemetry_is_as_its_forwarder_finds_it(inventory: Inventory, tmp_path: Path) -> None:
    broker = Broker.in_folder(tmp_path / "broker")
    with broker, a_device(f'[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n') as device:
        spool = device.state.spool.parent
        wait_until(lambda: read_link(spool).state == CONNECTED, "it connects")
        assert levels(check_device(as_known(device), {}), "telemetry") == [OK]
        broker.stop()
        wait_until(lambda: read_link(spool).state != CONNECTED, "it notices")
        found = check_device(as_known(device), {})
        assert levels(found, "telemetry") == [WARN]
        assert f"127.0.0.1:{broker.port}" in says(found, "telemetry")


def test_the_way_there(inventory: Inventory, sshd: SshDevice, tmp_path: Path) -> None:
    new_ssh_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    unreachable = check_device(sshd.device(port=free_port()), {})
    changed = check_device(sshd.device(host_key=other), {})
    stranger = check_device(replace(sshd.device(), identity=str(tmp_path / "other")), {})
    for found, check, mend in (
        (unreachable, "reachable", "--address"),
        (changed, "host key", "edgert device set board --repin"),
        (stranger, "login", "ssh-copy-id"),
    ):
        assert [(f.check, f.level, f.exit_code) for f in found] == [(check, FAIL, 6)]
        assert mend in says(found, check)
    found = check_device(sshd.device(), {})
    assert levels(found, "reachable") == [OK]
    assert levels(found, "installed") == [FAIL]


def test_a_transport_that_nobody_knows_is_a_finding(inventory: Inventory, daemon: devices.Device) -> None:
    (found,) = check_device(as_known(daemon, transport="telnet"), {})
    assert (found.level, found.exit_code) == (FAIL, 4)
    assert "known: ssh, local" in found.says


def test_an_agent_that_hangs_up_is_a_warning(
    inventory: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))

        def hang_up() -> None:
            for _ in range(2):
                agent.accept()[0].close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        found = check_host(inventory)
        thread.join(30)
    assert "no agent answers" in says(found, "ssh")
    assert FAIL not in levels(found, "ssh")


def test_one_device_that_is_silent_holds_up_no_other(
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
    assert main(["doctor", "nobody"]) == 4
    assert main(["doctor", "--host"]) == 0
    inventory.path.write_text("[devices.X]\n")
    assert main(["doctor"]) == 4
    assert f"next: repair {inventory.path}" in capfd.readouterr().out
