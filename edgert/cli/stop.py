"""`edgertd stop`."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import click

from edgert.cli.output import emit, json_option, progress
from edgert.config import check_is_device
from edgert.daemon.monitor import monitor_of, signal_monitor
from edgert.daemon.system.service_manager import manager_of
from edgert.durable import locked
from edgert.errors import DaemonUnreachable, DeviceError
from edgert.protocol.control import ask
from edgert.state_dir import StateDir

STOP_S_MAX = 30.0
POLL_S = 0.05


@click.command()
@json_option
@click.pass_obj
def stop(state: StateDir, as_json: bool) -> None:
    """Stop the daemon; do nothing if no daemon runs. The state folder must belong to a device.

    The daemon answers the requests that have arrived and refuses new requests. If a systemd unit runs the daemon, this
    command fails and prints the command to use, because systemd would restart the daemon.

    \b
    Example:
      edgertd stop
    """
    if manager := manager_of(state.root, active=True):
        raise DeviceError(
            f"systemd runs this daemon, and would restart it. Stop it until the next boot with: {manager} stop edgertd; "
            f"for good: {manager} disable --now edgertd"
        )
    pid = stop_daemon(state)
    if pid is None:
        check_is_device(state)
        emit({"stopped": False}, "no daemon runs", as_json)
    else:
        emit({"stopped": True, "pid": pid}, f"edgertd (pid {pid}) has stopped", as_json)


def stop_daemon(state: StateDir) -> int | None:
    """Stop the daemon and wait for its end; return its process id, or None if no daemon runs."""
    try:
        pid = int(ask(state.control_socket, {"op": "stop"})["pid"])
    except DaemonUnreachable:
        _end_monitor(state)
        return None
    try:
        if state.read_only:
            _wait_for_the_end(pid)
        else:
            locked(state.pid, STOP_S_MAX).close()
    except BlockingIOError as error:
        raise DeviceError(f"the daemon (pid {pid}) still runs after {STOP_S_MAX:.0f} s: see {state.log}") from error
    return pid


def _end_monitor(state: StateDir) -> None:
    """End the monitor, which would restart the daemon after a pause. Raises DeviceError."""
    until = time.monotonic() + STOP_S_MAX
    told = None
    while (monitor := monitor_of(state.root)) is not None:
        if time.monotonic() >= until:
            raise DeviceError(f"the monitor (pid {monitor}) still runs after {STOP_S_MAX:.0f} s: see {state.log}")
        if monitor != told:
            signal_monitor(monitor, signal.SIGTERM)
            told = monitor
            progress(f"no daemon runs; ending its monitor (pid {monitor}), which would start the next daemon")
        time.sleep(POLL_S)


def _wait_for_the_end(pid: int) -> None:
    """Wait for the end of process `pid` without its lock file. Raises BlockingIOError after STOP_S_MAX."""
    until = time.monotonic() + STOP_S_MAX
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() >= until:
            raise BlockingIOError
        time.sleep(POLL_S)
