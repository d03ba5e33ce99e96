"""A worker as the supervisor holds it: the process, our end of its channel, its run page."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

from edgert.checks.status import LoadedStatus
from edgert.daemon.memory import process_mb
from edgert.errors import EdgeRTError
from edgert.versions.slots import Version
from edgert.worker_link import channel
from edgert.worker_link.run_page import RunPage

STOP_S_MAX = 25.0
EXIT_S_MAX = 1.0  # from the end of its channel to the end of the process


class WorkerState(str, Enum):
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(eq=False)
class WorkerProcess:
    """`facts` is what it said when it became ready, `mb` its memory when it was last looked at (0: never).

    `load_s_max` is how long it may load, from `started_s` on; `doing` what it said last of a load that takes long.
    """

    process: subprocess.Popen[bytes]
    channel: socket.socket
    page: RunPage
    version: Version
    started_s: float
    state: WorkerState = WorkerState.LOADING
    stop_by_s: float | None = None
    killed_at_s: float | None = None
    loaded: LoadedStatus | None = None
    failure: EdgeRTError | None = None
    mb: float = 0.0
    connected_at_s: float = 0.0
    load_s_max: float = 0.0
    doing: str = ""

    @classmethod
    def start(cls, order: dict[str, Any], version: Version, now_s: float) -> WorkerProcess:
        """Start a process and give it `order` (see edgert.worker.worker.LoadOrder). Raises OSError."""
        with contextlib.ExitStack() as on_error:
            page = RunPage.create()
            on_error.callback(page.close)
            ours, theirs = channel.pair()
            on_error.callback(ours.close)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "edgert.worker.worker", "--channel", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            on_error.pop_all()
        ours.setblocking(False)
        with contextlib.suppress(OSError):  # it died at once: the closed channel will tell
            channel.send(ours, order, (page.descriptor,))
        return cls(process, ours, page, version, now_s)

    def stop(self, *, final: bool, now_s: float) -> None:
        """Ask it to answer what it has and end. `final`: its clients are told that the daemon stops."""
        if self.state is WorkerState.STOPPING:
            return
        self.state, self.stop_by_s = WorkerState.STOPPING, now_s + STOP_S_MAX
        try:
            channel.send(self.channel, {"op": "stop", "final": final})
        except OSError:
            self.kill(now_s)

    def kill(self, now_s: float, why: EdgeRTError | None = None) -> None:
        """End it at once; `why` becomes the reason of its end."""
        self.failure = why or self.failure
        self.killed_at_s = self.killed_at_s or now_s
        self.process.kill()

    def reaped(self) -> int:
        """Its exit code, once its channel has closed: whatever keeps the process then is of no use any more."""
        try:
            code = self.process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.page.close()
        return code

    def measure(self) -> float:
        """Its memory now, in MB; what it was when it is gone."""
        self.mb = process_mb(self.process.pid) or self.mb
        return self.mb

    @property
    def used_at_s(self) -> float:
        """When somebody last connected or was answered by the engine."""
        return max(self.connected_at_s, self.page.last_run_s())
