"""A worker process in the daemon: its link, its run page, and its last known state."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import subprocess
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.checks.status import LoadedStatus
from edgert.daemon.workers.fork_server import ForkedProcess, Process, start_alone
from edgert.errors import EdgeRTError, ErrorText
from edgert.machine import process_mb
from edgert.typed_json import from_json, to_json
from edgert.versions.slots import Version
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage
from edgert.worker_link.run_page import RunPage

STOP_S_MAX = 25.0
LOAD_S_MAX = 180.0
PROGRESS_S_MAX = 900.0  # the longest time between two progress lines of an engine, such as during a TensorRT build
EXIT_S_MAX = 1.0  # the longest time from the end of the link to the end of the process
NO_QUERY = 0  # the number of a query whose answer is ignored


@dataclass(eq=False)
class WorkerProcess:
    """A worker process. All times are monotonic seconds.

    Attributes:
        process: The process, or the fork that the fork server starts.
        link: The daemon's end of the link.
        folder: The slot of the version.
        started_s: The start of the process; later by the time for which daemon and workers were paused.
        serves_since_s: The time when the worker began to serve; None before that.
        stop_by_s: The time when the worker must have ended; None until the worker is told to stop.
        loaded: The worker's description of the loaded version; None until the worker is ready.
        failure: The reason of the worker's end, if it is known.
        mb: The last measurement of the memory; 0 before the first measurement.
        load_s_max: The longest time from the start until the worker is ready.
        progress: The last progress line of a long load.
        asked_s: The time when `ask` asked for a sign of life; None after any message of the worker.
    """

    process: Process
    link: socket.socket
    page: RunPage
    version: Version
    folder: Path
    started_s: float
    serves_since_s: float | None = None
    stop_by_s: float | None = None
    killed_at_s: float | None = None
    loaded: LoadedStatus | None = None
    failure: EdgeRTError | None = None
    mb: float = 0.0
    connected_at_s: float = 0.0
    load_s_max: float = LOAD_S_MAX
    progress: str = ""
    alarms: tuple[str, ...] = ()
    asked_s: float | None = None

    @classmethod
    def start(
        cls,
        load_message: LoadMessage,
        version: Version,
        now_s: float,
        start_process: Callable[[socket.socket], Process] = start_alone,
    ) -> WorkerProcess:
        """Start a process and send it `load_message`. Raises OSError."""
        with contextlib.ExitStack() as on_error:
            page = RunPage.create()
            on_error.callback(page.close)
            ours, theirs = link.pair()
            on_error.callback(ours.close)
            with theirs:
                process = start_process(theirs)
            on_error.pop_all()
        ours.setblocking(False)
        with contextlib.suppress(OSError):  # the process has already ended; the loop will see the closed link
            link.send(ours, to_json(load_message), (page.descriptor,))
        return cls(process, ours, page, version, Path(load_message.folder), now_s)

    def handle_message(self, message: dict[str, Any], now_s: float) -> None:
        """Handle the worker's message about itself.

        Raises ValueError, KeyError, TypeError or OverflowError for a malformed message, and OSError if the process has
        ended.
        """
        op = message["op"]
        if op == "ready":
            self.loaded = from_json(LoadedStatus, message["loaded"])
        elif op == "started":
            if not isinstance(self.process, ForkedProcess):
                raise ValueError("this worker was not forked")
            self.process.started(int(message["pid"]))
        elif op == "progress":
            self.progress = str(message["line"])
            self.load_s_max = max(self.load_s_max, now_s - self.started_s + PROGRESS_S_MAX)
        elif op == "alarms":
            self.alarms = tuple(map(str, message["names"]))
        elif op == "failed":
            self.failure = ErrorText(str(message["code"]), str(message["message"])).as_error()

    def runs(self, version: Version | None) -> bool:
        """Return whether this worker serves or loads `version`."""
        return version is not None and version.digest == self.version.digest

    def served_s(self, now_s: float) -> float:
        """Return the time for which the worker has served; 0 while it loads."""
        return 0.0 if self.serves_since_s is None else now_s - self.serves_since_s

    @property
    def ending(self) -> bool:
        """Whether the worker was told to end."""
        return self.stop_by_s is not None or self.killed_at_s is not None

    def stop(self, *, final: bool, now_s: float) -> None:
        """Tell the worker to finish its requests and end. With `final`, clients learn that the daemon stops."""
        if self.stop_by_s is not None:
            return
        self.stop_by_s = now_s + STOP_S_MAX
        try:
            link.send(self.link, {"op": "stop", "final": final})
        except BlockingIOError:  # the queue is full of connections: after them, the worker reads the end of the link
            self.link.shutdown(socket.SHUT_WR)
        except OSError:
            self.kill(now_s)

    def kill(self, now_s: float, why: EdgeRTError | None = None) -> None:
        """Kill the worker. `why` becomes the reason of its end."""
        self.failure = why or self.failure
        self.killed_at_s = self.killed_at_s or now_s
        self.process.kill()

    @property
    def has_unread(self) -> bool:
        """Whether the worker has not read all messages of the daemon; False if the system does not tell."""
        with contextlib.suppress(OSError):  # some sandboxes lack this call
            return fcntl.ioctl(self.link, termios.TIOCOUTQ, bytes(4)) != bytes(4)
        return False

    def ask(self, now_s: float) -> None:
        """Ask the worker for a sign of life."""
        with contextlib.suppress(OSError):  # the link is full or closed
            link.send(self.link, {"op": "stats", "id": NO_QUERY})
            self.asked_s = now_s

    def wait_for_end(self) -> str:
        """Wait for the end of the process, whose link has closed; return a description of the end."""
        try:
            code = self.process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.page.close()
        if code is None:
            return "exit code unknown"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def measure(self) -> float:
        """Measure the memory of the process; return the MB, or the last value if the process has ended."""
        self.mb = process_mb(self.process.pid) or self.mb
        return self.mb

    @property
    def used_at_s(self) -> float:
        """The last time when a client connected or the engine ran."""
        return max(self.connected_at_s, self.page.last_run_s())
