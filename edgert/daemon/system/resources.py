"""Resources of the daemon before it serves: the state folder's lock, descriptors for clients."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import stat
from collections.abc import Iterator

from edgert.durable import locked
from edgert.errors import DeviceError, StorageFailed
from edgert.state_dir import StateDir


@contextlib.contextmanager
def sole_daemon(state: StateDir) -> Iterator[int | None]:
    """Lock the state folder's pid file while the block runs; yield the inode of that file.

    On read-only storage without that file, lock the folder of the models and yield None. Raises DeviceError if
    another daemon runs.
    """
    with contextlib.ExitStack() as stack:
        try:
            if state.read_only:
                locked_file = state.pid if state.pid.exists() else state.models
                descriptor = os.open(locked_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                state.make()
                file = stack.enter_context(locked(state.pid, wait_s=0))
                descriptor, text = file.fileno(), f"{os.getpid()}\n".encode()
                with contextlib.suppress(OSError):  # the disk is full, but only the lock matters
                    file.write(text)
                    file.truncate(len(text))
        except BlockingIOError as error:
            raise DeviceError(f"a daemon already runs on {state.root}; stop it with: edgertd stop") from error
        except OSError as error:
            raise StorageFailed(f"cannot lock {state.pid}: {error.strerror}") from error
        status = os.fstat(descriptor)
        yield status.st_ino if stat.S_ISREG(status.st_mode) else None


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the hard limit. The workers inherit it; each client needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
