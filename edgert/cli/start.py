"""`edgertd start`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import click

from edgert.cli.output import emit, json_option, progress
from edgert.config import read_config
from edgert.daemon.monitor import LOG_BYTES_MAX, has_lost_its_monitor, monitor_of, signal_monitor
from edgert.daemon.system.service_manager import manager_of
from edgert.durable import storing
from edgert.errors import DaemonUnreachable, DeviceError
from edgert.protocol.control import ask
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
    pid = _daemon_pid(state)
    if pid is None:
        if manager := manager_of(state.root):
            raise DeviceError(
                f"systemd runs this daemon, and a second daemon would conflict with it. Start it with: {manager} start edgertd"
            )
        _, pid = start_daemon(state)
    elif has_lost_its_monitor(pid):
        with _open_log(state) as log:
            _start_monitor(state, log, "--adopt", str(pid))
        progress("the monitor that restarts the daemon was killed; a new monitor has adopted the daemon")
    socket = os.fspath(state.socket(config.socket))
    text = f"edgertd runs (pid {pid}) and listens on {socket}"
    emit({"pid": pid, "socket": socket}, text, as_json)


def start_daemon(state: StateDir) -> tuple[subprocess.Popen[bytes] | None, int]:
    """Start a monitor with its daemon; return it and the daemon's process id, once the daemon answers.

    If a monitor already runs and its daemon was killed, this monitor starts the next daemon: then the result has no
    process. Raises DeviceError and StorageFailed.
    """
    monitor, told = None, None
    until = time.monotonic() + START_S_MAX
    with _open_log(state) as log:
        while time.monotonic() < until:
            pid = _daemon_pid(state)
            if pid is not None:
                return monitor, pid
            if monitor is not None and monitor.poll() is not None:
                break
            other = None if monitor else monitor_of(state.root)
            if monitor is None and other is None:
                monitor = _start_monitor(state, log)
            elif other is not None and other != told:
                signal_monitor(other, signal.SIGCONT)
                told = other
                progress(f"no daemon answers yet, but its monitor (pid {other}) runs and starts it now")
            time.sleep(POLL_S)
    lines = Path(log.name).read_text(errors="replace").splitlines()[-5:]
    raise DeviceError(f"the daemon did not start; the end of {log.name}:\n  " + "\n  ".join(lines))


def _start_monitor(state: StateDir, log: BinaryIO, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "edgert.daemon.monitor", "--state", os.fspath(state.root), *options],
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


def _daemon_pid(state: StateDir) -> int | None:
    try:
        return int(ask(state.control_socket, {"op": "status"})["pid"])
    except DaemonUnreachable:
        return None
