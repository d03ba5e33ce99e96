"""`edgertd` as forks of a process with edgert loaded. A new Python imports edgert for 0.1 s.

    python -m tests.support.stand_ins.forked_edgertd SOCKET

Each command has a process of its own, with the files, folder, environment, umask and limits of its `edgertd_client`,
and is killed if its client ends first. `ForkedEdgertd` is the other end.

`edgertd start` starts no monitor, but the daemon itself, also as a fork. Nothing restarts this daemon after a crash.
Its workers are forks of its fork server, also if the device has one model.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import marshal
import os
import pkgutil
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

from edgert.state_dir import StateDir
from tests.support.paths import ROOT
from tests.support.stand_ins.edgertd_client import CODE_BYTES, LENGTH_BYTES

CLIENT = Path(__file__).with_name("edgertd_client.py")
EDGERTD = (sys.executable, "-m", "edgert.cli")
PROGRAMS = ("edgert.cli", "edgert.telemetry.forwarder_process")  # each has a function `main` of its arguments
END_S_MAX = 120.0  # long enough for a busy machine
DESCRIPTORS_MAX = 1000  # no process here has a descriptor above


@cache
def shared() -> ForkedEdgertd:
    """Return the one of this process of pytest. tests/conftest.py closes it after the last test."""
    return ForkedEdgertd().wait_until_ready()


class ForkedEdgertd:
    """A process that forks for each `edgertd`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="edgert-"))  # short, as the paths of sockets must be
        self._socket = self._folder / "forks"
        self._python_path = os.environ.get("PYTHONPATH")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # only the tests see Ctrl-C
        )

    def wait_until_ready(self) -> ForkedEdgertd:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=END_S_MAX)
        self._process.stdout.close()
        shutil.rmtree(self._folder)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs `argv` in a fork, if it is one of PROGRAMS in this source tree; else `argv`."""
        is_ours = tuple(argv[:2]) == EDGERTD[:2] and argv[2] in PROGRAMS
        if not is_ours or os.environ.get("PYTHONPATH") != self._python_path:
            return list(argv)
        return [sys.executable, "-I", "-S", str(CLIENT), str(self._socket), *argv[2:]]


class _Server:
    """Forks for each client and tells the client how its fork ended."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(100)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin, selectors.EVENT_READ, lambda: False)  # the tests have ended

    def serve(self) -> None:
        """Serve until stdin closes. A fork never returns from here."""
        while False not in [key.data() for key, _ in self._selector.select()]:
            pass

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        with contextlib.suppress(OSError, EOFError):
            head, files, _, _ = socket.recv_fds(link, LENGTH_BYTES, 3)
            with link.makefile("rb") as stream:
                here = marshal.loads(stream.read(int.from_bytes(head, "big")))
            pid = os.fork()
            if not pid:
                _be(here, files)
            for file in files:
                os.close(file)
            ended = os.pidfd_open(pid)
            self._selector.register(ended, selectors.EVENT_READ, lambda: self._ended(link, pid, ended))
            self._selector.register(link, selectors.EVENT_READ, lambda: self._left(link, pid))

    def _left(self, link: socket.socket, pid: int) -> None:
        if link.fileno() < 0:  # closed a moment ago: the fork has ended, too
            return
        self._selector.unregister(link)
        os.kill(pid, signal.SIGKILL)  # it is not reaped yet

    def _ended(self, link: socket.socket, pid: int, ended: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(KeyError):  # the client has left
            self._selector.unregister(link)
        with contextlib.suppress(OSError), link:
            link.sendall(code.to_bytes(CODE_BYTES, "big", signed=True))


def _be(here: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Run the command in this fork as a process of the client's would, and end with its exit code."""

    def run() -> int:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, max(files) + DESCRIPTORS_MAX)
        os.chdir(here["folder"])
        os.umask(here["umask"])
        os.environb.clear()
        os.environb.update(here["environment"])
        time.tzset()
        for number, (soft, hard) in here["limits"]:
            resource.setrlimit(number, (soft, hard))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run_program(*here["words"])

    _end_with(run)


def _run_program(module: str, *words: str) -> int:
    sys.argv[1:] = words
    return int(importlib.import_module(module).main(words))


def _end_with(run: Callable[[], int]) -> NoReturn:
    """End this fork with the exit code of `run`, as the interpreter does."""
    code = 1
    try:
        code = run()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - a fork must not go on as the server
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


# --- the daemon and its workers ---------------------------------------------------------------------------


class _Fork(subprocess.Popen[bytes]):
    """A fork that ends with the exit code of `run`."""

    def __init__(self, run: Callable[[], int]) -> None:
        self._run = run
        super().__init__(EDGERTD)

    def _execute_child(self, *_: object) -> None:
        self.pid = os.fork()
        if not self.pid:
            _end_with(self._run)
        self._child_created = True


def _start_daemon(state: StateDir, log: BinaryIO, *options: str) -> subprocess.Popen[bytes]:
    """Start the daemon of `state` in place of its monitor."""
    return _Fork(lambda: _serve(state, log.fileno()))


def _serve(state: StateDir, log: int) -> int:
    os.setsid()
    os.chdir("/")
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    os.closerange(3, DESCRIPTORS_MAX)
    _prepare_workers()
    return _run_program("edgert.cli", "--state", str(state.root), "serve")


def _prepare_workers() -> None:
    """Make the fork server of this daemon, which no thread and no open database may have a part of."""
    from edgert.daemon.workers.fork_server import WorkerStarter
    from edgert.worker_link import link

    ours, theirs = socket.socketpair()
    ready, start = [_Fork(lambda: _serve_forks(theirs, ours))], link.start
    theirs.close()

    def start_or_use(module: str, end: socket.socket) -> subprocess.Popen[bytes]:
        if module != "edgert.worker.fork_server" or not ready:
            return start(module, end)
        socket.send_fds(ours, [b"-"], [end.fileno()])
        return ready.pop()

    link.start = start_or_use
    WorkerStarter.forks = property(lambda starter: starter._forks)  # type: ignore[assignment, method-assign]


def _serve_forks(link: socket.socket, other: socket.socket) -> int:
    """Be the fork server whose link the daemon sends; end if the daemon needs none."""
    from edgert.worker import fork_server

    other.close()
    _, files, _, _ = socket.recv_fds(link, 1, 1)
    link.close()
    if files:
        fork_server._import_engines = lambda: None  # each worker imports its own engine
        sys.argv[1:] = ["--link", str(files[0])]
        fork_server.main()
    return 0


def _load() -> None:
    import edgert

    edgertd_start: ModuleType = importlib.import_module("edgert.cli.start")
    edgertd_start._start_monitor = _start_daemon  # type: ignore[attr-defined]
    sdk_versions: ModuleType = importlib.import_module("edgert.engines.sdk_versions")
    sdk_versions._version = _versions().get  # type: ignore[attr-defined]

    for each in pkgutil.walk_packages(edgert.__path__, "edgert."):
        if not each.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(each.name)
    gc.collect()
    gc.freeze()


def _versions() -> dict[str, str | None]:
    """Return the version of each engine's SDK. A fork imports the SDKs, because they may start threads."""
    from edgert.engines import ENGINES
    from edgert.engines.sdk_versions import _version

    reader, writer = os.pipe()

    def tell() -> int:
        os.write(writer, marshal.dumps({name: _version(name) for name in ENGINES}))
        return 0

    fork = _Fork(tell)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        versions: dict[str, str | None] = marshal.loads(answer.read())
    assert fork.wait() == 0
    return versions


if __name__ == "__main__":
    _load()
    _server = _Server(sys.argv[1])
    print("ready", flush=True)
    _server.serve()
