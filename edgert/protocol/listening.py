"""A Unix socket that accepts connections."""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from edgert.errors import ConfigInvalid

# How many new connections may wait; the kernel may allow fewer. A non-blocking connect to a full queue fails at once.
BACKLOG = 4096
PROBE_S_MAX = 1.0
SO_PASSRIGHTS = 83  # Linux 6.16 and newer; Python has no name for it yet


@contextmanager
def listening(path: Path, mode: int, group: str = "") -> Iterator[socket.socket]:
    """Listen at `path` with this mode and group, without blocking. Remove the socket at the end.

    If the kernel supports it, clients cannot send descriptors. Raises ConfigInvalid.
    """
    with ExitStack() as stack:
        try:
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.parent.chmod(0o755)  # despite the umask, apps of other users must reach the socket
            _remove_stale_socket(path)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            mask = os.umask(0o177)  # so no client connects before mode and group are set
            try:
                listener.bind(os.fspath(path))
            finally:
                os.umask(mask)
            if group and path.stat().st_gid != (gid := grp.getgrnam(group).gr_gid):
                os.chown(path, -1, gid)
            path.chmod(mode)
            with suppress(OSError):  # on an older kernel, the receiver closes descriptors that arrive
                listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigInvalid(f"cannot listen on {path}: {error.strerror}") from error
        except KeyError as error:
            raise ConfigInvalid(
                f"socket_group: there is no group {group!r} here. Create it, or set another group"
            ) from error
        listener.setblocking(False)
        stack.callback(_remove_own_socket, path, path.stat().st_ino)
        yield listener


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a killed process. Raises ConfigInvalid for anything else at `path`."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigInvalid(f"{path} is not a socket: configure another path, or move it away")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(PROBE_S_MAX)
            probe.connect(os.fspath(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return
    raise ConfigInvalid(f"another process listens on {path}: stop it, or configure another path")


def _remove_own_socket(path: Path, inode: int) -> None:
    with suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()
