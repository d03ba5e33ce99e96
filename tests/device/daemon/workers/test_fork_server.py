"""Workers are forks of one server. If a fork is not possible, each worker is a separate program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgert.daemon.workers import fork_server
from edgert.daemon.workers.fork_server import ForkedProcess, Process, WorkerStarter
from edgert.worker_link import link
from tests.support.devices import wait_until

START_S_MAX = 60.0  # the imports, on a busy machine


class Starts:
    """A starter, and the daemon's ends of the workers' links."""

    def __init__(self) -> None:
        self.starter = WorkerStarter()
        self.ends: list[socket.socket] = []

    def ask(self) -> Process:
        """Start a worker, which waits for its load message."""
        ours, theirs = link.pair()
        ours.settimeout(START_S_MAX)
        self.ends.append(ours)
        with theirs:
            return self.starter(theirs)

    def worker(self) -> ForkedProcess:
        """Return a worker that has started."""
        process = self.ask()
        assert isinstance(process, ForkedProcess)
        received = link.receive(self.ends[-1])
        assert received is not None
        assert received[0]["op"] == "started"
        process.started(received[0]["pid"])
        return process

    def kill_server(self) -> None:
        pid = self.starter.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def starts() -> Iterator[Starts]:
    made = Starts()
    yield made
    for end in made.ends:
        end.close()
    made.starter.close()


def test_workers_are_forks_of_one_server_with_one_thread_and_end_with_their_exit_codes(starts: Starts) -> None:
    first, second = starts.worker(), starts.worker()
    for process in (first, second):
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"PPid:\t{starts.starter.pid}\n" in status
    assert len(os.listdir(f"/proc/{starts.starter.pid}/task")) == 1
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.0)
    starts.ends[0].close()  # a worker without a load message ends normally
    assert first.wait(START_S_MAX) == 0
    second.kill()
    assert second.wait(START_S_MAX) == -signal.SIGKILL
    second.kill()  # the worker has already ended, so nothing happens


def test_a_worker_that_is_killed_before_it_starts_ends_when_it_starts(starts: Starts) -> None:
    process = starts.ask()
    process.kill()
    received = link.receive(starts.ends[0])
    assert received is not None
    assert isinstance(process, ForkedProcess)
    process.started(received[0]["pid"])
    assert process.wait(START_S_MAX) == -signal.SIGKILL
    with pytest.raises(ValueError, match="once"):
        process.started(os.getpid())


def test_a_worker_that_never_starts_ends_together_with_its_stopped_server(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pid = starts.worker(), starts.starter.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    process = starts.ask()
    process.kill()  # the server may still start it
    monkeypatch.setattr(fork_server, "FORK_S_MAX", 0.0)
    process.kill()
    assert link.receive(starts.ends[-1]) is None
    assert process.wait() is None
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    starts.worker().kill()
    before.kill()


def test_workers_survive_their_killed_server_and_the_next_workers_get_a_new_server(starts: Starts) -> None:
    process, before = starts.worker(), starts.starter.pid
    starts.kill_server()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    second = starts.worker()
    assert starts.starter.pid != before
    process.kill()
    assert process.wait(START_S_MAX) is None, "its exit code went with the first server"
    second.kill()
    assert second.wait(START_S_MAX) == -signal.SIGKILL


def test_a_server_that_never_forked_a_worker_is_not_started_again(
    starts: Starts, capsys: pytest.CaptureFixture[str]
) -> None:
    process = starts.ask()
    starts.starter.kill_unused_server()
    assert link.receive(starts.ends[0]) is None, "who waits for it sees the end"
    assert (process.pid, process.wait()) == (0, None)
    pid = starts.starter.pid
    assert pid is not None
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    alone = [starts.ask() for _ in range(2)]
    assert all(isinstance(each, subprocess.Popen) for each in alone)
    (logged,) = capsys.readouterr().err.splitlines()
    assert logged.endswith(" no fork server (it ended with -9): this worker starts as a separate program")
    for end in starts.ends:
        end.close()
    assert [each.wait(START_S_MAX) for each in alone] == [0, 0]


def test_a_server_with_a_second_thread_refuses_to_fork(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thread of a library may hold a lock during the fork, and the worker would wait for this lock for ever."""
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()"
    (tmp_path / "sitecustomize.py").write_text(thread)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    starts.ask()
    assert link.receive(starts.ends[0]) is None
    wait_until(lambda: "1 more thread" in capfd.readouterr().err, "it says why before it ends")


def test_a_server_whose_imports_hang_ends_and_the_next_workers_start_alone(
    starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this limit, the workers of all models would wait for the server for ever."""
    hangs = """if True:
        import signal, time
        from edgert import engines
        alarm, engines.engine_by_name = signal.alarm, lambda name: time.sleep(1e6)
        signal.alarm = lambda limit_s: alarm(min(limit_s, 1))
    """
    (tmp_path / "sitecustomize.py").write_text(hangs)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    starts.ask()
    assert link.receive(starts.ends[0]) is None
    monkeypatch.undo()
    assert isinstance(starts.ask(), subprocess.Popen)
