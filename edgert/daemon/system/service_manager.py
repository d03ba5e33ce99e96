"""Messages to systemd, if it runs the daemon: sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(message: str) -> None:
    """Send a message such as READY=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s() -> float | None:
    """Return the period of WATCHDOG=1, half the manager's time-out; None if it expects none."""
    try:
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return int(os.environ["WATCHDOG_USEC"]) / 1e6 / 2 if ours else None
    except (KeyError, ValueError):
        return None
