"""The forwarder's process, with a real broker and without a broker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert.config import PASSWORD_CREDENTIAL, DeviceConfig, MqttConfig
from edgert.errors import ConfigInvalid
from edgert.state_dir import StateDir
from edgert.stop import STOP_S_MAX
from edgert.telemetry.forwarder import SPOOL_CHECK_S
from edgert.telemetry.forwarder_process import broker_settings
from edgert.telemetry.mqtt import (
    MqttSettings,
)
from edgert.telemetry.spool import Spool
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port
from tests.support.stand_ins.forwarder import TOPICS, Listener, append_to


@pytest.fixture
def listener(broker: Broker) -> Iterator[Listener]:
    listening = Listener(broker.settings)
    yield listening
    listening.stop()


def test_an_idle_forwarder_needs_no_measurable_time_and_sends_reports_of_another_process(
    tmp_path: Path, broker: Broker, listener: Listener
) -> None:
    forwarder = start_forwarder(tmp_path, broker.settings)
    wait_until(lambda: listener.payloads(TOPICS.sys), "it is connected")

    def is_idle() -> bool:
        before, began = _cpu_s(forwarder.pid), time.monotonic()
        time.sleep(2 * SPOOL_CHECK_S)
        return _cpu_s(forwarder.pid) - before < 0.02 * (time.monotonic() - began)

    wait_until(is_idle, "it has begun, and costs nothing from then on")
    append_to(Spool(StateDir(tmp_path).spool), 1)
    wait_until(lambda: listener.seqs() == [1], "the report")
    stop(forwarder)


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_broker_sends_lost_when_the_forwarder_is_killed_and_no_report_is_lost(
    tmp_path: Path, broker: Broker, listener: Listener
) -> None:
    spool = Spool(StateDir(state_folder(tmp_path, broker.settings)).spool)
    sent = 0
    while not spool.stats().rows:  # on a busy machine, all messages may have arrived before the kill
        append_to(spool, 400)
        sent += 400
        first = start_forwarder(tmp_path, broker.settings)
        wait_until(lambda: len(listener.seqs()) >= sent - 340, "reports begin to arrive")  # noqa: B023
        first.send_signal(signal.SIGKILL)
        first.wait()
        wait_until(lambda: listener.payloads(TOPICS.status)[-2:] == [b"online", b"lost"], "online, then lost")
    second = start_forwarder(tmp_path, broker.settings)
    wait_until(lambda: spool.stats().rows == 0, "the spool is empty")
    wait_until(lambda: set(listener.seqs()) == set(range(1, sent + 1)), "every report, some perhaps twice")
    stop(second)
    wait_until(lambda: listener.payloads(TOPICS.status)[-2:] == [b"online", b"offline"], "online, then offline")


def test_the_process_stops_within_two_seconds_while_its_broker_is_down(tmp_path: Path) -> None:
    forwarder = start_forwarder(tmp_path, MqttSettings("127.0.0.1", free_port()))
    assert forwarder.stderr is not None
    assert b"no broker answers" in forwarder.stderr.readline()
    stop(forwarder)


def test_the_process_stops_within_two_seconds_while_its_broker_is_silent(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        forwarder = start_forwarder(tmp_path, MqttSettings("127.0.0.1", silent.getsockname()[1]))
        accepted, _ = silent.accept()
        with accepted:
            stop(forwarder)


@pytest.mark.parametrize("action", [("--boot", "b1"), ("--clear", "show")])
def test_an_invalid_configuration_ends_the_process_with_the_reason(tmp_path: Path, action: tuple[str, str]) -> None:
    ended = start_forwarder(tmp_path, MqttSettings("127.0.0.1", 1883), device="7", action=action)
    _, said = ended.communicate()
    assert ended.returncode == ConfigInvalid.exit_code
    assert b"'d7'" in said
    assert b"Traceback" not in said


@pytest.mark.parametrize("credential", [False, True])
def test_the_password_of_the_service_manager_comes_before_the_configured_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, credential: bool
) -> None:
    config = DeviceConfig("d1", "p", mqtt=MqttConfig(host="h", username="u", password_file="/etc/password"))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    if credential:
        (tmp_path / PASSWORD_CREDENTIAL).write_text("secret\n")
    wanted = str(tmp_path / PASSWORD_CREDENTIAL) if credential else "/etc/password"
    assert broker_settings(config) == MqttSettings("h", username="u", password_file=wanted)


def state_folder(folder: Path, settings: MqttSettings, device: str = TOPICS.device) -> Path:
    """A state folder with a configuration for the broker of `settings`."""
    lines = [
        f'device = "{device}"',
        f'site = "{TOPICS.site}"',
        'profile = "raspberry-pi-5"',
        "[serving]",
        "window_s = 30.0",
    ]
    lines += ["[mqtt]", *(f"{name} = {json.dumps(value)}" for name, value in vars(settings).items())]
    (folder / "config.toml").write_text("\n".join(lines))
    StateDir(folder).make()
    return folder


def start_forwarder(
    folder: Path, settings: MqttSettings, device: str = TOPICS.device, action: tuple[str, str] = ("--boot", "b1")
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "edgert.telemetry.forwarder_process", *action, "--state"]
    return subprocess.Popen([*command, str(state_folder(folder, settings, device))], stderr=subprocess.PIPE)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process by a signal. A supervisor waits STOP_S_MAX before it kills the process."""
    assert STOP_S_MAX < 2
    process.terminate()
    assert process.wait(WAIT_S_MAX) == 0
    if process.stderr:
        process.stderr.close()
