"""Sends messages to systemd (sd_notify(3)) and finds the systemd manager that runs a daemon."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path

from edgert.config import UNIT

ANSWER_S_MAX = 10.0


def notify(message: str) -> None:
    """Send a message such as READY=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s() -> float | None:
    """Return the period of the message WATCHDOG=1, half of systemd's time-out; None without a time-out."""
    try:
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        period_us = int(os.environ["WATCHDOG_USEC"]) / 2
        return period_us / 1e6 if ours and period_us > 0 else None
    except (KeyError, ValueError):
        return None


def manager_of(state: Path, *, active: bool = False) -> str | None:
    """Return `systemctl` or `systemctl --user` if its unit runs the daemon of `state`, else None.

    With `active`, a unit that is only enabled is ignored, because it starts the daemon only at the next boot.
    """
    if not os.path.isdir("/run/systemd/system"):
        return None
    return next(
        (manager for manager in ("systemctl", "systemctl --user") if _runs_daemon(manager, state, active)), None
    )


def _runs_daemon(manager: str, state: Path, active: bool) -> bool:
    words = [*manager.split(), "show", UNIT, "--property=ExecStart,ActiveState,UnitFileState"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"}  # SSH and `su` do not always set it
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=ANSWER_S_MAX)
    except (OSError, subprocess.TimeoutExpired):
        return False
    properties = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    used = properties.get("ActiveState") not in ("inactive", "failed")
    if not active:
        used = used or properties.get("UnitFileState", "").startswith("enabled")
    return used and f" --state {state} serve " in properties.get("ExecStart", "")
