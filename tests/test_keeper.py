"""The keeper: starts the daemon again, and ends when it should."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.devices import Device, a_device, wait_until


@pytest.fixture
def device() -> Iterator[Device]:
    with a_device(started=False) as device:
        yield device


@pytest.fixture
def keeper(device: Device) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "edgert.serving.keeper", "--state", os.fspath(device.state.root)]
    with device.state.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    wait_until(lambda: device.run("status")["daemon"]["running"], "the daemon runs")
    yield process
    process.kill()
    process.wait()


def kill_daemon(device: Device) -> None:
    os.kill(device.run("status")["daemon"]["pid"], signal.SIGKILL)


def test_told_to_end_it_takes_the_daemon_along(device: Device, keeper: subprocess.Popen[bytes]) -> None:
    keeper.terminate()
    assert keeper.wait(30) == 0
    assert not device.run("status")["daemon"]["running"]


def test_told_to_end_while_it_waits_to_start_again_it_ends(device: Device, keeper: subprocess.Popen[bytes]) -> None:
    kill_daemon(device)
    wait_until(lambda: "starting it again" in device.log(), "it has noticed")
    keeper.terminate()
    assert keeper.wait(30) == 0
    assert not device.run("status")["daemon"]["running"]


def test_it_ends_where_the_state_folder_is_gone(device: Device, keeper: subprocess.Popen[bytes]) -> None:
    pid = device.run("status")["daemon"]["pid"]
    shutil.rmtree(device.state.root)
    os.kill(pid, signal.SIGKILL)
    assert keeper.wait(30) == 0
    device.prepare()
