"""A full disk: the daemon and the live version keep working, and a failed trial ends without a free block."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgert.config import read_config
from edgert.errors import EdgeRTError
from edgert.versions.install import install
from tests.support.devices import Device, a_device, wait_until

ITEM = np.ones((1, 4), np.float32)


@pytest.fixture(params=["tmpfs", "ext4"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A running device whose state folder is a small file system."""
    with a_device(started=False, programs=True) as device:
        config = device.state.config.read_text()
        if not mounted(request.param, device):
            pytest.skip(f"needs to mount {request.param}: run as root, outside of a restricted container")
        try:
            device.state.keys.mkdir()
            (device.state.keys / "test.pem").write_bytes(device.key.public.pem())
            device.state.config.write_text(config)
            device.start()
            device.put()
            yield device
        finally:
            device.stop()
            subprocess.run(["umount", "-l", device.state.root], check=True)


def mounted(kind: str, device: Device) -> bool:
    """Mount a new small file system on the state folder; return False if this process may not mount."""
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
    written = -1
    while written != (size := ballast.stat().st_size if ballast.exists() else 0):
        written = size
        with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        # With its next commit, ext4 frees the blocks of removed files and its reserved blocks.
        subprocess.run(["sync", "--file-system", device.state.root], check=True)
    with contextlib.suppress(OSError), device.state.log.open("ab", buffering=0) as log:
        while log.write(b"."):
            pass
    return ballast


@pytest.fixture
def frees_nothing(device: Device) -> Iterator[Device]:
    """The device with its spool on another disk. Its files stay open, so the end of a process frees no block."""
    device.stop()
    spool = device.folder / "spool"
    shutil.copytree(device.state.spool.parent, spool)
    shutil.rmtree(device.state.spool.parent)
    device.state.spool.parent.symlink_to(spool)
    device.start()
    install(device.bundle(release=2), device.state, read_config(device.state))
    with contextlib.ExitStack() as held:
        for path in device.state.root.rglob("*"):
            if path.is_file():
                held.enter_context(path.open("rb"))
        yield device


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_crashed_worker_restarts_and_the_daemon_survives(device: Device) -> None:
    daemon, worker = device.daemon_pid(), device.serving()["pid"]
    assert daemon is not None
    fill(device)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: device.serving()["pid"] not in (None, worker), "it serves again")
    with device.client() as client:
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()
    assert alive(daemon)


def test_on_a_full_disk_an_install_is_refused_and_the_live_version_serves(device: Device) -> None:
    bundle = device.bundle(release=2)
    fill(device)
    assert device.run("install", os.fspath(bundle), code=7)["error"]["code"] == "device.storage_failed"
    with device.client() as client:
        assert client.infer("echo", ITEM, trace=True).release == 1


def test_a_trial_that_runs_out_ends_without_a_free_block(frees_nothing: Device) -> None:
    device = frees_nothing
    device.run("activate", "echo", "--trial", "20s")
    ballast = fill(device)
    assert written_state(device) == "trial", "the disk was full in time"
    wait_until(lambda: serves(device, 1), "the good version serves")
    restarted_on_a_full_disk(device)
    ballast.unlink()
    wait_until(lambda: written_state(device) == "steady", "the rollback is written", pause_s=0.5)
    assert device.serving()["fault"] is None


def test_a_version_that_crashes_on_trial_is_rolled_back_without_a_free_block(frees_nothing: Device) -> None:
    """A restarted daemon does not load the version again, although the trial lasts for 10 minutes."""
    device = frees_nothing
    device.run("activate", "echo", "--trial", "10m")
    ballast = fill(device)
    killed: list[int] = []
    for _ in range(3):
        wait_until(lambda: device.serving()["pid"] not in (None, *killed), "a worker of the version on trial serves")
        assert serves(device, 2)
        killed.append(device.serving()["pid"])
        os.kill(killed[-1], signal.SIGKILL)
    wait_until(lambda: serves(device, 1), "the good version serves")
    restarted_on_a_full_disk(device)
    ballast.unlink()
    wait_until(lambda: written_state(device) == "steady", "the rollback is written", pause_s=0.5)
    assert device.model()["rolled_back"]["release"] == 2


def restarted_on_a_full_disk(device: Device) -> None:
    """Kill and restart the daemon. Release 1 serves before and after, and the daemon writes nothing."""
    is_rolled_back_in_memory(device)
    daemon = device.daemon_pid()
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: device.daemon_pid() not in (None, daemon), "it is started again")
    wait_until(lambda: device.serving()["pid"] is not None, "a version serves again")
    assert serves(device, 1)
    is_rolled_back_in_memory(device)


def is_rolled_back_in_memory(device: Device) -> None:
    assert "free some space" in device.serving()["fault"]
    assert (written_state(device), device.model()["state"]) == ("trial", "steady")


def written_state(device: Device) -> str:
    """Return the state of the slots that is on the disk."""
    return str(json.loads((device.state.models / "echo" / "state.json").read_bytes())["state"])


def serves(device: Device, release: int) -> bool:
    """Return whether `release` answers an app."""
    with contextlib.suppress(EdgeRTError, OSError), device.client() as client:
        return client.infer("echo", ITEM, trace=True).release == release
    return False
