"""A worker process: its messages about itself, and its end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from edgert.daemon.workers.worker_process import LOAD_S_MAX, PROGRESS_S_MAX, STOP_S_MAX, WorkerProcess
from edgert.errors import DeviceError, EdgeRTError, EngineFailed
from edgert.versions.slots import Version
from edgert.worker_link import link
from tests.support.stand_ins.workers import LOAD_MESSAGE, FakeWorker, ready_message

VERSION = Version(1, "digest", good=True)


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    one = FakeWorker(VERSION, now_s=100.0)
    yield one
    one.close()


def running(*command: str) -> WorkerProcess:
    return WorkerProcess.start(LOAD_MESSAGE, VERSION, 0.0, lambda theirs: subprocess.Popen(command))


def test_a_worker_receives_its_order_and_the_run_page() -> None:
    got: list[tuple[dict[str, Any], int]] = []

    def start(theirs: socket.socket) -> subprocess.Popen[bytes]:
        ends.append(theirs.dup())
        return subprocess.Popen(["true"])

    ends: list[socket.socket] = []
    worker = WorkerProcess.start(LOAD_MESSAGE, VERSION, 0.0, start)
    received = link.receive(ends[0])
    assert received is not None
    got.append((received[0], len(received[1])))
    assert (got[0][0]["model"], got[0][1]) == ("echo", 1)
    assert worker.wait_for_end() == "exit code 0"
    worker.link.close()
    ends[0].close()


def test_the_end_of_a_process_is_reported_by_its_code_or_signal() -> None:
    ended = running("sh", "-c", "exit 3")
    assert ended.wait_for_end() == "exit code 3"
    killed = running("sleep", "600")
    why = DeviceError("it is stuck")
    killed.kill(1.0, why)
    killed.kill(2.0)
    assert killed.wait_for_end() == "killed by signal 9"
    assert (killed.failure, killed.killed_at_s, killed.ending) == (why, 1.0, True)
    for worker in (ended, killed):
        worker.link.close()


def test_progress_extends_the_load_and_never_shortens_it(worker: FakeWorker) -> None:
    assert worker.load_s_max == LOAD_S_MAX
    worker.handle_message({"op": "progress", "line": "layer 1"}, 400.0)
    assert (worker.progress, worker.load_s_max) == ("layer 1", 300.0 + PROGRESS_S_MAX)
    worker.handle_message({"op": "progress", "line": "layer 2"}, 300.0)
    assert worker.load_s_max == 300.0 + PROGRESS_S_MAX


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": "ready"},
        {"op": "ready", "loaded": {"release": 1}},
        {"op": "started", "pid": 7},
        {"op": "progress"},
        {"op": "alarms", "names": None},
        {"op": "failed", "message": "x"},
        {"op": "failed", "code": "x"},
    ],
    ids=str,
)
def test_an_invalid_message_of_a_worker_raises_an_error_that_the_supervisor_handles(
    worker: FakeWorker, message: dict[str, Any]
) -> None:
    """The supervisor kills a worker for these errors. Any other error would end the daemon."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        worker.handle_message(message, 100.0)


def test_a_failure_becomes_an_edgert_error_whatever_the_worker_sends(worker: FakeWorker) -> None:
    worker.handle_message(ready_message(), 100.0)
    assert worker.loaded is not None
    worker.handle_message({"op": "failed", "message": ["x"], "code": 7}, 100.0)
    assert (type(worker.failure), str(worker.failure)) == (EdgeRTError, "['x']")
    worker.handle_message(link.failure_message(EngineFailed("no memory")), 100.0)
    assert (type(worker.failure), str(worker.failure)) == (EngineFailed, "no memory")


def test_a_worker_is_asked_once_to_end_and_is_killed_if_the_request_fails(worker: FakeWorker) -> None:
    for now_s in (100.0, 200.0):
        worker.stop(final=True, now_s=now_s)
    assert (worker.asked(), worker.stop_by_s, worker.killed) == (["stop"], 100.0 + STOP_S_MAX, False)
    gone = FakeWorker(VERSION, now_s=100.0)
    gone.their_end.close()
    gone.stop(final=False, now_s=100.0)
    assert gone.killed
    gone.link.close()


def test_a_worker_whose_queue_is_full_ends_after_it_has_read_the_queue(worker: FakeWorker) -> None:
    """Many clients connected just before the worker must end. A kill would end requests in progress."""
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            link.send(worker.link, {"op": "connection"})
            sent += 1
    worker.stop(final=False, now_s=100.0)
    assert not worker.killed
    assert [link.receive(worker.their_end) for _ in range(sent)] == [({"op": "connection"}, [])] * sent
    assert link.receive(worker.their_end) is None
    link.send(worker.their_end, {"op": "stats"})  # the worker can still report
    assert link.receive(worker.link) == ({"op": "stats"}, [])
