"""`edgertd start`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import click

from edgert.checks.status import DaemonStatus, ask_daemon
from edgert.cli.output import emit, json_option, progress
from edgert.cli.stop import end_monitor
from edgert.config import read_config
from edgert.daemon.monitor import LOG_BYTES_MAX, has_lost_its_monitor, monitor_of
from edgert.daemon.system.service_manager import manager_of
from edgert.durable import storing
from edgert.errors import DaemonUnreachable, DeviceError
from edgert.state_dir import StateDir

START_S_MAX = 30.0
POLL_S = 0.05


@click.command()
@json_option
@click.pass_obj
def start(state: StateDir, as_json: bool) -> None:
    """Run the daemon in the background and restart it when it ends.

    If a daemon runs already, the command changes nothing. The daemon's log is `edgertd.log` in the state folder. If a
    systemd unit runs the daemon, this command fails and prints the command to use.

    \b
    Example:
      edgertd start && edgertd status
    """
    config = read_config(state)
    running = _status(state)
    if running is None:
        if manager := manager_of(state.root):
            raise DeviceError(
                f"systemd runs this daemon, and a second daemon would conflict with it. Start it with: {manager} start edgertd"
            )
        _, running = start_daemon(state)
    elif has_lost_its_monitor(running.pid):
        progress(
            "the daemon's monitor was killed, so nothing restarts the daemon after a crash: run edgertd stop, then edgertd start"
        )
    socket = os.fspath(state.socket(config.socket))
    text = f"edgertd runs (pid {running.pid}) and listens on {socket}"
    emit({"pid": running.pid, "socket": socket}, text, as_json)


def start_daemon(state: StateDir) -> tuple[subprocess.Popen[bytes], DaemonStatus]:
    """Start a monitor; return it and its daemon's status once the daemon answers.

    Raises DeviceError and StorageFailed.
    """
    with _open_log(state) as log:
        end_monitor(state)
        monitor = _start_monitor(state, log)
        until = time.monotonic() + START_S_MAX
        while time.monotonic() < until:
            running = _status(state)
            if running is not None:
                return monitor, running
            if monitor.poll() is not None and monitor_of(state.root) is None:  # not replaced by another start
                break
            time.sleep(POLL_S)
    lines = Path(log.name).read_text(errors="replace").splitlines()[-5:]
    raise DeviceError(f"the daemon did not start; the end of {log.name}:\n  " + "\n  ".join(lines))


def _start_monitor(state: StateDir, log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "edgert.daemon.monitor", "--state", os.fspath(state.root)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        cwd="/",
    )


def _open_log(state: StateDir) -> BinaryIO:
    """Open the daemon's log to append to it. Raises StorageFailed."""
    with storing(f"cannot write {state.log}"):
        path = state.path_for_new(state.log.name)  # the log is in memory if the storage is read-only
    with storing(f"cannot write {path}"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.replace(path.with_suffix(".log.1"))
        return path.open("ab")


def _status(state: StateDir) -> DaemonStatus | None:
    try:
        return ask_daemon(state.control_socket)
    except DaemonUnreachable:
        return None
