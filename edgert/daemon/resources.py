"""Resources of the daemon before it serves: the lock of the state folder, and descriptors for its clients."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from edgert.config import StateDir
from edgert.durable import locked
from edgert.errors import DeviceError, StorageFailed


@contextlib.contextmanager
def sole_daemon(state: StateDir) -> Iterator[int]:
    """Lock the state folder's pid file while the block runs; yield the inode of that file.

    Raises DeviceError where another daemon runs.
    """
    try:
        state.make()
        file = locked(state.pid, wait_s=0)
    except BlockingIOError as error:
        raise DeviceError(f"a daemon runs on {state.root} already; stop it with: edgertd stop") from error
    except OSError as error:
        raise StorageFailed(f"cannot write {state.pid}: {error.strerror}") from error
    with file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        yield os.fstat(file.fileno()).st_ino


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the hard limit, here and in the workers: each client needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
