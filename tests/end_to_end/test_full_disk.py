"""A full disk: the daemon and the live version keep working, and a trial ends once there is space."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.devices import Device, a_device, wait_until

ITEM = np.ones((1, 4), np.float32)


@pytest.fixture
def device() -> Iterator[Device]:
    """A running device whose state folder is a small filesystem."""
    with a_device(started=False) as device:
        config = device.state.config.read_text()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", device.state.root], check=False)
        if mounted.returncode:
            pytest.skip("needs to mount a file system: run as root, outside of a restricted container")
        try:
            device.state.keys.mkdir()
            (device.state.keys / "test.pem").write_bytes(device.key.public.pem())
            device.state.config.write_text(config)
            device.run("start")
            device.deploy()
            yield device
        finally:
            device.run("stop")
            subprocess.run(["umount", "-l", device.state.root], check=True)


def fill(device: Device) -> Path:
    """Write until the disk is full, including the last page of the log."""
    ballast = device.state.root / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with contextlib.suppress(OSError), device.state.log.open("ab", buffering=0) as log:
        while log.write(b"."):
            pass
    return ballast


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_crashed_worker_restarts_and_the_daemon_survives(device: Device) -> None:
    status = device.run("status")
    daemon, worker = status["daemon"]["pid"], device.model()["serving"]["pid"]
    fill(device)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: device.model()["serving"]["pid"] not in (None, worker), "it serves again")
    with device.client() as client:
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()
    assert alive(daemon)


def test_an_install_is_refused_and_the_live_version_serves(device: Device) -> None:
    bundle = device.bundle(release=2)
    fill(device)
    assert device.run("install", os.fspath(bundle), code=7)["error"]["code"] == "device.storage_failed"
    with device.client() as client:
        assert client.infer("echo", ITEM, trace=True).release == 1


def test_a_trial_that_ended_is_rolled_back_once_there_is_space(device: Device) -> None:
    device.run("install", os.fspath(device.bundle(release=2)))
    device.run("activate", "echo", "--trial-s", "2")
    ballast = fill(device)
    with device.client() as client:
        wait_until(lambda: bool(device.model()["serving"]["fault"]), "it could not be rolled back")
        ballast.unlink()
        wait_until(lambda: client.infer("echo", ITEM, trace=True).release == 1, "the version before returns")
    assert device.model()["state"] == "steady"
