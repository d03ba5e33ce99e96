"""systemd accepts the units. They give the daemon few rights, and the daemon works with these rights."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.config import DeviceConfig, FollowConfig, MqttConfig
from edgert.daemon.system import service_manager
from edgert.errors import DeviceError
from edgert.state_dir import StateDir
from edgert_deploy.devices.facts import MachineFacts
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.service import _GIVE_TO_USER, Unit, check, unit_for
from edgert_deploy.devices.transports.local import LocalTransport
from tests.support.devices import WAIT_S_MAX, a_device
from tests.support.machines import PI_4

EXPOSURE_MAX = 1.6
BOARD = Device("board", "ssh", "root@board", "raspberry-pi-4", "/var/lib/edgert", home="/opt/edgert")
AS_ROOT: MachineFacts = replace(PI_4, uid=0)
WITH_PASSWORD = DeviceConfig("d-1", "p", mqtt=MqttConfig("broker", password_file="/var/lib/edgert/mqtt-password"))

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def system_unit(
    engines: tuple[str, ...] = ("tflite",), config: DeviceConfig | None = None, device: Device = BOARD
) -> Unit:
    unit = unit_for(device, AS_ROOT, engines, config)
    assert unit is not None
    assert not unit.user
    return unit


def written(unit: Unit, folder: Path) -> Path:
    """Write the unit with another command, which exists here, because systemd checks the command."""
    path = folder / "edgertd.service"
    path.write_text(unit.text.replace("ExecStart=/opt/edgert/venv/bin/edgertd", f"ExecStart={shutil.which('true')}"))
    return path


@needs_analyze
@pytest.mark.parametrize("config", [None, WITH_PASSWORD], ids=["plain", "password"])
def test_systemd_accepts_the_units(tmp_path: Path, config: DeviceConfig | None) -> None:
    spaced = replace(BOARD, state="/srv/my state")
    for unit in (system_unit(config=config), system_unit(("tensorrt",), config), system_unit(device=spaced)):
        done = subprocess.run(
            ["systemd-analyze", "verify", written(unit, tmp_path)], capture_output=True, text=True, timeout=60
        )
        ours = [line for line in done.stderr.splitlines() if "edgertd" in line]
        assert (done.returncode, ours) == (0, [])


@needs_analyze
@pytest.mark.parametrize("config", [None, WITH_PASSWORD], ids=["plain", "password"])
@pytest.mark.parametrize("engine", ["tflite", "tensorrt"])
def test_the_system_unit_has_a_low_exposure_level(tmp_path: Path, config: DeviceConfig | None, engine: str) -> None:
    words = ["systemd-analyze", "security", "--offline=true", f"--threshold={int(EXPOSURE_MAX * 10)}"]
    unit = written(system_unit((engine,), config), tmp_path)
    done = subprocess.run([*words, unit], capture_output=True, text=True, timeout=60)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot look at unit files (before 250)")
    overall = next(line for line in done.stdout.splitlines() if "Overall exposure level" in line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(overall.partition("edgertd.service: ")[2].split()[0]) <= EXPOSURE_MAX


@pytest.mark.parametrize("home", ["/var/lib/edgert", "/var/lib/edgert/home"])
def test_a_unit_of_root_refuses_a_runtime_that_the_daemons_user_can_change(home: str) -> None:
    with pytest.raises(DeviceError, match="--home outside"):
        unit_for(replace(BOARD, home=home), AS_ROOT)
    assert unit_for(replace(BOARD, home=home), PI_4) is not None


def test_the_unit_opens_devices_and_homes_only_if_they_are_needed() -> None:
    assert "PrivateDevices=yes" in system_unit(("tflite", "onnxruntime")).text
    assert "PrivateDevices" not in system_unit(("tensorrt", "onnxruntime")).text
    assert "ProtectHome=yes" in system_unit().text
    assert "ProtectHome=read-only" in system_unit(device=replace(BOARD, home="/home/pi/edgert")).text


def test_the_unit_passes_the_password_of_the_broker_only_if_one_is_configured() -> None:
    assert "LoadCredential" not in system_unit().text
    line = "LoadCredential=mqtt-password:/var/lib/edgert/mqtt-password"
    lines = system_unit(config=WITH_PASSWORD).text.splitlines()
    assert line in lines
    assert lines[lines.index(line) + 1] == "ReadOnlyPaths=-/var/lib/edgert/mqtt-password"


def test_the_unit_also_passes_the_login_of_the_registry() -> None:
    config = replace(WITH_PASSWORD, follow=FollowConfig("oci://r/x", credentials="/var/lib/edgert/registry-login"))
    lines = system_unit(config=config).text.splitlines()
    assert "LoadCredential=registry-login:/var/lib/edgert/registry-login" in lines
    assert "LoadCredential=mqtt-password:/var/lib/edgert/mqtt-password" in lines


def test_the_daemon_is_in_the_group_that_its_socket_is_given_to() -> None:
    assert "Group=edgert" in system_unit().text.splitlines()
    assert "Group=apps" in system_unit(config=DeviceConfig("d-1", "p", socket_group="apps")).text.splitlines()


def test_the_watchdog_is_pinged_twice_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    assert service_manager.watchdog_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert service_manager.watchdog_s() == 30
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert service_manager.watchdog_s() is None


def test_the_daemon_reports_ready_and_then_pings_and_then_reports_its_stop() -> None:
    with a_device(started=False) as device, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = device.folder / "notify"
        manager.bind(os.fspath(path))
        manager.settimeout(WAIT_S_MAX)
        environment = {**os.environ, "NOTIFY_SOCKET": os.fspath(path), "WATCHDOG_USEC": "400000"}
        command = [sys.executable, "-m", "edgert.cli", "--state", os.fspath(device.state.root), "serve"]
        daemon = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            said = [manager.recv(100) for _ in range(4)]
            daemon.terminate()
            while b"STOPPING=1" not in said:
                said.append(manager.recv(100))
            assert daemon.wait(WAIT_S_MAX) == 0
        finally:
            daemon.kill()
        assert said.count(b"READY=1") == 1
        assert said.count(b"WATCHDOG=1") >= 3


# --- before anything is sent ------------------------------------------------------------------------


@needs_root
def test_a_read_only_system_is_refused_unless_it_has_the_unit_already(tmp_path: Path) -> None:
    unit = replace(system_unit(), path=os.fspath(tmp_path / "edgertd.service"))
    if subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=False).returncode:
        pytest.skip("needs to mount a file system: run outside of a restricted container")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        with pytest.raises(DeviceError, match=f"{tmp_path} cannot be written by root.*--service monitor"):
            check(LocalTransport(BOARD), BOARD, unit)
        subprocess.run(["mount", "-o", "remount,bind,rw", tmp_path], check=True)
        Path(unit.path).touch()
        subprocess.run(["mount", "-o", "remount,bind,ro", tmp_path], check=True)
        check(LocalTransport(BOARD), BOARD, unit)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


# --- the user of the service ------------------------------------------------------------------------


@needs_root
def test_commands_of_root_run_as_the_owner_of_the_state_folder() -> None:
    nobody = pwd.getpwnam("nobody")
    if subprocess.run(["runuser", "-u", "nobody", "--", sys.executable, "-c", "import edgert, tarfile"]).returncode:
        pytest.skip(f"{sys.executable} lies where other users may not look")
    with a_device(started=False) as device:
        device.folder.chmod(0o755)
        for path in (device.state.root, device.state.keys, device.state.config):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        bundle = device.bundle()
        bundle.chmod(0o644)  # the owner of the state folder reads it
        device.run("install", os.fspath(bundle))
        device.run("start")
        device.run("activate", "echo")
        device.run("check", "echo")
        device.run("mark-good", "echo")
        daemon, worker = device.run("status")["daemon"]["pid"], device.serving()["pid"]
        for pid in (daemon, worker):
            assert Path(f"/proc/{pid}").stat().st_uid == nobody.pw_uid
        owners = {path.stat().st_uid for path in device.state.root.rglob("*") if path.name != "test.pem"}
        assert owners == {nobody.pw_uid}
        device.run("stop")


@needs_root
def test_the_state_folder_belongs_to_the_user_and_trusted_files_belong_to_root() -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = StateDir(Path(folder) / "my state")
        state.make()
        state.keys.mkdir()
        for path in (state.config, state.keys / "a.pem", state.root / "mqtt-password", state.models / "x"):
            path.write_text("")

        def give() -> str:
            words = ["sh", "-c", _GIVE_TO_USER, "sh", os.fspath(state.root), "daemon"]  # a user that every system has
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout

        assert give() != ""
        assert give() == ""
        assert {path.owner() for path in (state.root, state.models, state.models / "x")} == {"daemon"}
        trusted = (state.config, state.keys, state.keys / "a.pem", state.root / "mqtt-password")
        assert {path.owner() for path in trusted} == {"root"}
