"""A full disk: the daemon and the live version keep working, and a failed trial ends without a free block."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgert.errors import EdgeRTError
from tests.support.devices import Device, a_device, wait_until

ITEM = np.ones((1, 4), np.float32)


@pytest.fixture(params=["tmpfs", "ext4"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A running device whose state folder is a small filesystem."""
    with a_device(started=False) as device:
        config = device.state.config.read_text()
        if not mounted(request.param, device):
            pytest.skip(f"needs to mount {request.param}: run as root, outside of a restricted container")
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


def mounted(kind: str, device: Device) -> bool:
    """Mount a new small filesystem on the state folder; return False where this process may not."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs"]
    if kind == "ext4":
        image = device.folder / "disk"
        with image.open("wb") as file:
            file.truncate(32 * 1024**2)
        if subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=False).returncode:
            return False
        mount = ["mount", "-o", "loop", os.fspath(image)]
    return subprocess.run([*mount, device.state.root], check=False).returncode == 0


def fill(device: Device) -> Path:
    """Write until the disk is full, including the last page of the log."""
    ballast = device.state.root / "ballast"
    for _ in range(2):  # ext4 frees the blocks of removed files with its next commit
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        with contextlib.suppress(OSError), ballast.open("rb") as file:
            os.fsync(file.fileno())
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


def test_a_trial_that_runs_out_ends_without_a_free_block(device: Device) -> None:
    device.run("install", os.fspath(device.bundle(release=2)))
    device.run("activate", "echo", "--trial-s", "5")
    ballast = fill(device)
    wait_until(lambda: serves(device, 1), "the good version serves")
    assert "free some space" in device.serving()["fault"]
    os.kill(device.run("status")["daemon"]["pid"], signal.SIGKILL)  # it is started again, on a full disk
    wait_until(lambda: serves(device, 1), "the good version serves again")
    # The end of the first daemon may free a block: then the roll-back is written already.
    assert device.model()["state"] in ("trial", "steady")
    ballast.unlink()
    wait_until(lambda: device.model()["state"] == "steady", "the roll-back is written", pause_s=0.5)
    assert device.model()["rolled_back"]["reason"] == "the trial was not confirmed in time"
    assert device.serving()["fault"] is None


def test_a_version_that_crashes_on_trial_is_rolled_back_without_a_free_block(device: Device) -> None:
    device.run("install", os.fspath(device.bundle(release=2)))
    device.run("activate", "echo", "--watch-s", "600")
    fill(device)
    os.kill(device.serving()["pid"], signal.SIGKILL)
    wait_until(lambda: serves(device, 1), "the good version serves")
    if device.model()["state"] == "trial":  # else a block was free after all
        assert "could not be written" in device.serving()["fault"]


def serves(device: Device, release: int) -> bool:
    """Return whether an app is answered by `release`."""
    with contextlib.suppress(EdgeRTError, OSError), device.client(2.0) as client:
        return client.infer("echo", ITEM, trace=True).release == release
    return False
