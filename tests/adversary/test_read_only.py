"""Storage that has become read-only, like a worn SD card: live versions serve, even after restarts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from edgert import Client
from edgert.config import read_config
from edgert.daemon.system.resources import sole_daemon
from edgert.errors import DeviceError
from edgert.state_dir import SYSTEM_SOCKET, StateDir
from edgert_deploy.bootstrap.uninstall import uninstall
from edgert_deploy.devices.inventory import Device as LocalDevice
from edgert_deploy.devices.logs import LogRequest, read_log
from edgert_deploy.devices.transports.local import LocalTransport
from tests.support.devices import WAIT_S_MAX, Device, a_device

pytestmark = pytest.mark.usefixtures("edgertd_is_forked")

ITEM = np.ones((1, 4), np.float32)


@pytest.mark.parametrize("pid_file", [True, False])
def test_a_device_on_read_only_storage_serves_and_refuses_changes(pid_file: bool) -> None:
    with a_device() as device:
        root = os.fspath(device.state.root)
        device.put()
        bundle = device.bundle(release=2)
        device.stop()
        if not pid_file:
            device.state.pid.unlink()
        if subprocess.run(["mount", "--bind", root, root], check=False).returncode:
            pytest.skip("needs to mount a file system: run as root, outside of a restricted container")
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
            device.start()
            with a_client_of(device) as client:
                assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()
            daemon = device.run("status")["daemon"]
            assert daemon["read_only"] is True, daemon
            here = LocalDevice("here", "local", root, "this-machine", root)
            log = device.state.volatile("edgertd.log").read_text().splitlines()
            assert read_log(LocalTransport(here), here, LogRequest())[: len(log)] == log != []
            for words in (["install", os.fspath(bundle)], ["rollback", "echo"], ["claim", "echo", "--by", "me"]):
                error = device.run(*words, code=7)["error"]
                assert (error["code"], "Read-only file system" in error["message"]) == ("device.storage_failed", True)
            with pytest.raises(DeviceError, match="already runs on"), sole_daemon(device.state):
                pass
            assert device.run("stop")["stopped"]
        finally:
            subprocess.run(["umount", "-l", root], check=True)
        device.start()
        with device.client() as client:
            assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()
        assert device.run("status")["daemon"]["read_only"] is False


@pytest.mark.skipif(os.geteuid() != 0, reason="root's daemons have their files in /run/edgert")
def test_an_uninstall_keeps_the_files_of_other_daemons_in_memory(tmp_path: Path) -> None:
    device = LocalDevice(
        "board", "ssh", "root@board", "p", str(tmp_path / "state"), home=str(tmp_path / "home"), host_key="k"
    )
    Path(device.home).mkdir()
    Path(device.state).mkdir()
    folder, own = SYSTEM_SOCKET.parent, StateDir(Path(device.state)).volatile("control.sock")
    other = folder / "000000000000-control.sock"
    folder.mkdir(exist_ok=True)
    try:
        for file in (own, other):
            file.touch()
        assert str(own) in uninstall(device, LocalTransport(device), purge=True).removed
        assert [file.exists() for file in (own, other)] == [False, True]
    finally:
        other.unlink(missing_ok=True)


def a_client_of(device: Device) -> Client:
    return Client(device.state.socket(read_config(device.state).socket), timeout_s=WAIT_S_MAX)
