"""The control socket's client distinguishes a daemon that ends during a command from a busy daemon."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import DaemonBusy, DaemonEnded, ProtocolError
from edgert.protocol.control import answer_of, ask


def answer_to(folder: Path, respond: Callable[[socket.socket], object]) -> dict[str, Any]:
    """Return the answer of a daemon that calls `respond` with the connection and closes the connection."""
    path = folder / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as connection:
                respond(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return ask(path, {"op": "status"}, timeout_s=60)
        finally:
            thread.join()


@pytest.mark.parametrize("read_bytes", [1, 4096], ids=["the request is unread: reset", "the request is read: end"])
def test_a_daemon_that_is_killed_while_it_is_asked_is_reported_as_ended(tmp_path: Path, read_bytes: int) -> None:
    with pytest.raises(DaemonEnded, match=r"ended before it answered; check its log, and run this again"):
        answer_to(tmp_path, lambda connection: connection.recv(read_bytes))


def test_an_answer_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        answer_to(tmp_path, lambda connection: connection.recv(4096) and connection.send(b"{\n"))


def test_the_status_of_hundreds_of_models_is_read(tmp_path: Path) -> None:
    status = {"models": {f"model-{i}": {"runs": [i] * 4096} for i in range(300)}}
    line = json.dumps(answer_of(status)).encode() + b"\n"
    assert len(line) > 4 * 1024**2

    def respond(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(line)

    assert answer_to(tmp_path, respond) == status


def test_a_daemon_whose_queue_is_full_is_reported_as_busy(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        with pytest.raises(DaemonBusy, match=r"cannot reach the daemon|did not answer"):
            ask(path, {"op": "status"}, timeout_s=0.1)
