"""Another user tries to take the locks and to change the files, even if every process ran with umask 000."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgert_deploy.devices.claims import setting_up
from edgert_deploy.devices.inventory import Device as KnownDevice
from edgert_deploy.devices.transports.local import LocalTransport
from tests.support.devices import a_device

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
NOBODY = 65534


def attack(root: Path) -> set[str]:
    """Return the paths below `root` that another user can lock or change, each with the way."""
    for folder in root.parents:
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    paths = [root, *(Path(folder, name) for folder, below, files in os.walk(root) for name in (*below, *files))]
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, "\n".join(f"{how} {path}" for path in paths for how in taken(path)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        lines = found.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    return {line.replace(f"{root}/", "") for line in lines}


def taken(path: Path) -> Iterator[str]:
    """Yield the ways in which this process can lock or change `path`."""
    if path.is_dir() and os.access(path, os.W_OK):
        yield "fill"
    for how, flags in (("lock", os.O_RDONLY), ("write", os.O_WRONLY)):
        with contextlib.suppress(OSError):
            file = os.open(path, flags)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(file)
            if not path.is_dir():
                yield how


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Let every process create files that everybody may write, unless it sets their mode."""
    mask = os.umask(0)
    yield
    os.umask(mask)


def test_other_users_cannot_take_the_locks_or_change_the_files_of_a_running_device(no_umask: None) -> None:
    with a_device(started=False) as device:
        device.state.root.chmod(0o777)  # the mode of a folder that was created with umask 000
        device.state.keys.chmod(0o777)
        for file in (device.state.config, *device.state.keys.iterdir()):
            file.chmod(0o644)
        device.state.models.mkdir()
        device.state.pid.touch()  # with the mode that an earlier version left
        device.start()
        device.put()
        device.run("install", os.fspath(device.bundle(release=2)))
        device.run("claim", "echo", "--by", "me")
        assert attack(device.state.root) <= {"lock config.toml", "lock keys/test.pem"}
        with device.client() as client:
            assert client.infer("echo", np.ones((1, 4), np.float32))["y"].size


def test_apps_of_other_users_still_reach_the_socket_folder(no_umask: None) -> None:
    with a_device() as device:
        device.folder.chmod(0o755)
        assert device.state.root.stat().st_mode & 0o777 == 0o755
        assert device.socket.stat().st_mode & 0o777 == 0o660


def test_other_users_cannot_take_the_locks_in_the_folder_of_the_runtime(tmp_path: Path, no_umask: None) -> None:
    board = KnownDevice("board", "ssh", "pi@board", "p", str(tmp_path / "state"), home=str(tmp_path / "home"))
    home = Path(board.home)
    with setting_up(board, LocalTransport(board)):
        home.joinpath("lock").chmod(0o666)  # the mode that an earlier version left
    with setting_up(board, LocalTransport(board)) as held:
        held.run(["mkdir", "-p", f"{home}/venvs"], 10)
        assert attack(home) <= {f"lock {name}" for name in ("receipt", "setup")}
