"""Messages to the service manager, and the period of its watchdog."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edgert.daemon.system.service_manager import notify, watchdog_s


@pytest.mark.parametrize("abstract", [False, True])
def test_a_message_reaches_a_socket_with_a_path_or_with_an_abstract_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    address = f"@edgert-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")
        manager.settimeout(1)
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_without_a_service_manager_a_message_is_ignored(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")


@pytest.mark.parametrize(
    ("period_us", "pid", "wanted_s"),
    [
        ("30000000", None, 15.0),
        ("30000000", "ours", 15.0),
        ("30000000", "1", None),
        (None, None, None),
        ("soon", None, None),
        ("0", None, None),
        ("-1", None, None),
    ],
    ids=str,
)
def test_the_watchdog_is_notified_twice_in_its_period_and_only_by_its_process(
    monkeypatch: pytest.MonkeyPatch, period_us: str | None, pid: str | None, wanted_s: float | None
) -> None:
    """With a period of 0, the daemon's loop would never wait."""
    pid = str(os.getpid()) if pid == "ours" else pid
    for name, value in (("WATCHDOG_USEC", period_us), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert watchdog_s() == wanted_s
