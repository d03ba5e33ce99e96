"""sd_notify(3): what a service manager is told, where there is one."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(message: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s() -> float | None:
    """How often the manager wants to hear WATCHDOG=1: twice in its time-out; None where it does not."""
    try:
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return int(os.environ["WATCHDOG_USEC"]) / 1e6 / 2 if ours else None
    except (KeyError, ValueError):
        return None
