"""Resources that the daemon needs before it serves: the state folder's lock, descriptors for clients."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import locked, storing
from edgert.errors import DeviceError
from edgert.state_dir import StateDir


@dataclass(frozen=True)
class PidFile:
    """The pid file that this daemon locks. `inode` is None if read-only storage has no such file."""

    path: Path
    inode: int | None

    def still_exists(self) -> bool:
        """Return whether the locked file still exists, not only a new file at the same path."""
        try:
            return self.inode is None or self.path.stat().st_ino == self.inode
        except FileNotFoundError:
            return False
        except OSError:  # a faulty disk is no reason to stop serving
            return True


@contextlib.contextmanager
def sole_daemon(state: StateDir) -> Iterator[PidFile]:
    """Lock the state folder's pid file while the block runs, and yield the file.

    On read-only storage without a pid file, lock the folder of the models. Raises StorageFailed; also DeviceError if
    another daemon runs.
    """
    with contextlib.ExitStack() as stack:
        busy = DeviceError(f"a daemon already runs on {state.root}: stop this daemon with edgertd stop")
        with storing(f"cannot lock {state.pid}", busy):
            if state.read_only:
                locked_file = state.pid if state.pid.exists() else state.models
                descriptor = os.open(locked_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                state.make()
                file = stack.enter_context(locked(state.pid, wait_s=0))
                descriptor = file.fileno()
                text = f"{os.getpid()}\n".encode()
                with contextlib.suppress(OSError):  # the disk is full, but only the lock matters
                    file.write(text)
                    file.truncate(len(text))
        status = os.fstat(descriptor)
        yield PidFile(state.pid, status.st_ino if stat.S_ISREG(status.st_mode) else None)


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the hard limit, for workers too: each client needs a descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
