"""`edgertd` as forks of a process with edgert loaded. A new Python imports edgert for 0.1 s.

    python -m tests.support.stand_ins.forked_edgertd SOCKET

Each command has a process of its own, with the files, folder, environment, umask and limits of its `edgertd_client`,
and is killed if its client ends first. `ForkedEdgertd` is the other end.
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
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.devices import WAIT_S_MAX
from tests.support.paths import ROOT
from tests.support.stand_ins.edgertd_client import CODE_BYTES, LENGTH_BYTES

CLIENT = Path(__file__).with_name("edgertd_client.py")
EDGERTD = (sys.executable, "-m", "edgert.cli")


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

    def __enter__(self) -> ForkedEdgertd:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=WAIT_S_MAX)
        self._process.stdout.close()
        shutil.rmtree(self._folder)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs `argv` in a fork, if `argv` is an `edgertd` of this source tree; else `argv`."""
        if tuple(argv[: len(EDGERTD)]) != EDGERTD or os.environ.get("PYTHONPATH") != self._python_path:
            return list(argv)
        return [sys.executable, "-I", "-S", str(CLIENT), str(self._socket), *argv[len(EDGERTD) :]]


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


def _be(here: dict[str, Any], files: Sequence[int]) -> None:
    """Run the command in this fork as a process of the client's would, and end with its exit code."""
    code = 1
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, max(files) + 1000)
        os.chdir(here["folder"])
        os.umask(here["umask"])
        os.environb.clear()
        os.environb.update(here["environment"])
        time.tzset()
        for number, (soft, hard) in here["limits"]:
            resource.setrlimit(number, (soft, hard))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[1:] = here["words"]
        from edgert.cli import main

        code = main(here["words"])
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


def _load() -> None:
    import edgert

    for each in pkgutil.walk_packages(edgert.__path__, "edgert."):
        if not each.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(each.name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _load()
    _server = _Server(sys.argv[1])
    print("ready", flush=True)
    _server.serve()
