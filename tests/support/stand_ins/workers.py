"""A worker without a process, for tests of what the daemon does with its workers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.typed_json import to_json
from edgert.versions.slots import Version
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage
from tests.support.statuses import LOADED

LOAD_MESSAGE = LoadMessage("echo", "/slots/a", "digest", "/state", "boot")


class FakeProcess:
    """A process that ends when it is killed."""

    def __init__(self, pid: int) -> None:
        self.pid, self.killed = pid, False

    def kill(self) -> None:
        self.killed = True


class FakePage:
    """A run page whose run the test begins and ends."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.last_s = 0.0

    def running_since_s(self) -> float | None:
        return self.since_s

    def last_run_s(self) -> float:
        return self.last_s


class FakeWorker(WorkerProcess):
    """A worker whose messages the test sends; `their_end` is the process's end of the link."""

    def __init__(self, version: Version, now_s: float, pid: int = 1) -> None:
        ours, self.their_end = link.pair()
        ours.setblocking(False)
        self.their_end.setblocking(False)
        super().__init__(FakeProcess(pid), ours, FakePage(), version, Path(LOAD_MESSAGE.folder), now_s)  # type: ignore[arg-type]
        self.now_mb = 10.0

    @property
    def killed(self) -> bool:
        return bool(self.process.killed)  # type: ignore[attr-defined]

    @property
    def run_page(self) -> FakePage:
        return self.page  # type: ignore[return-value]

    def measure(self) -> float:
        self.mb = self.now_mb
        return self.mb

    def wait_for_end(self) -> str:
        return "killed by signal 11"

    def asked(self) -> list[str]:
        """Return the operations that the daemon has requested since the last call."""
        found: list[str] = []
        while True:
            try:
                received = link.receive(self.their_end)
            except BlockingIOError:
                return found
            assert received is not None
            found.append(str(received[0]["op"]))

    def close(self) -> None:
        for end in (self.link, self.their_end):
            end.close()


def ready_message() -> dict[str, Any]:
    """Return the message that a worker sends once it has loaded."""
    return {"op": "ready", "loaded": to_json(LOADED)}


def figures_message(**changes: Any) -> dict[str, Any]:
    """Return the message with which a worker that has answered nothing reports its figures."""
    return {"op": "figures", "requests": 0, "failed": 0, "p99_ms": 0.0, "compared": 0, "agreed": 0, **changes}


def connected() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a client's connection: the daemon's end, and the client's end."""
    return socket.socketpair()
