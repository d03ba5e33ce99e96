"""What a daemon holds of its machine while it runs: the state folder, its sockets, descriptors."""

from __future__ import annotations

import contextlib
import grp
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from edgert.config import StateDir
from edgert.durable import locked
from edgert.errors import ConfigInvalid, DeviceError, StorageFailed

BACKLOG = 4096  # a connect beyond it fails at once for a client that does not block; the kernel may hold less


@contextlib.contextmanager
def listening(path: Path, mode: int, group: str = "") -> Iterator[socket.socket]:
    """A socket at `path` of that mode and group, not blocking. Raises ConfigInvalid."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale_socket(path)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            mask = os.umask(0o177)  # nobody connects before mode and group are right
            try:
                listener.bind(os.fspath(path))
            finally:
                os.umask(mask)
            if group and path.stat().st_gid != (gid := grp.getgrnam(group).gr_gid):
                os.chown(path, -1, gid)
            path.chmod(mode)
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigInvalid(f"cannot listen on {path}: {error.strerror}") from error
        except KeyError as error:
            raise ConfigInvalid(f"socket_group: there is no group {group!r} here: make it, or name another") from error
        listener.setblocking(False)
        stack.callback(_remove_own_socket, path, path.stat().st_ino)
        yield listener


def _remove_stale_socket(path: Path) -> None:
    """Make room for our socket. Raises ConfigInvalid where something else lies there, or somebody listens."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigInvalid(f"{path} is not a socket: name another place in `socket`, or move it away")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(os.fspath(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:  # left behind by a daemon that was killed
        path.unlink(missing_ok=True)
        return
    raise ConfigInvalid(f"another daemon listens on {path}: stop it, or name another place in `socket`")


def _remove_own_socket(path: Path, inode: int) -> None:
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()


@contextlib.contextmanager
def sole_daemon(state: StateDir) -> Iterator[int]:
    """Hold the state folder's pid file, whose inode is given, for as long as the daemon runs."""
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
    """As many descriptors as may be, here and in the workers: each client takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
