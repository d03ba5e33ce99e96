"""The fork server: a process that has imported the modules of workers; its forks become workers.

The workers share the memory of these imports, and of an engine's set-up for its first session. So a worker starts at
once. The server has one thread and no open session, so a fork is safe. The daemon's part is
`edgert.daemon.workers.fork_server`. Daemon and server exchange `SOCK_SEQPACKET` messages of `edgert.worker_link.link`:

- `fork`, with one descriptor: the worker's end of its link. The new process sends `started` with its id on this link,
  and continues like `edgert.worker.worker`.
- `reap`, with the id of a process that has ended. The server answers with the process's exit code.

The server ends when its link closes, so it never outlives the daemon.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys

from edgert.engines import ENGINES, engine_by_name
from edgert.errors import DeviceError
from edgert.worker import worker
from edgert.worker_link import link

IMPORT_S_MAX = 120  # less than LOAD_S_MAX: the daemon cannot kill a worker that has not started


def main() -> None:
    """Run `python -m edgert.worker.fork_server`."""
    end = link.inherited_end()
    signal.alarm(IMPORT_S_MAX)  # SIGALRM ends this process if an import hangs; the workers then start alone
    _import_engines()
    signal.alarm(0)
    while (received := link.receive(end)) is not None:
        message, descriptors = received
        if message["op"] == "reap":
            _, status = os.waitpid(message["pid"], 0)
            link.send(end, {"code": os.waitstatus_to_exitcode(status)})
        else:
            _fork(end, socket.socket(fileno=descriptors[0]))


def _import_engines() -> None:
    for name in (name for name, kind in ENGINES.items() if kind.forkable):
        # workers import the other engines themselves
        with contextlib.suppress(Exception):  # a worker that needs a missing or broken engine reports the fault
            engine = engine_by_name(name)
            engine.version()
            engine.before_fork()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"workers cannot be forked: an engine left {threads - 1} more thread(s)")
    gc.collect()
    gc.freeze()  # otherwise, a garbage collection in a worker would write to the shared memory


def _fork(end: socket.socket, worker_end: socket.socket) -> None:
    try:
        if os.fork():
            worker_end.close()
            return
    except OSError as error:  # no memory or no process is left; without `started`, the daemon blames no version
        with contextlib.suppress(OSError):
            link.send(worker_end, link.failure_message(DeviceError(f"no worker can be started: {error.strerror}")))
        worker_end.close()
        return
    end.close()
    worker.run(worker_end, forked=True)


if __name__ == "__main__":
    main()
