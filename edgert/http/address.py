"""The address of the HTTP server: `127.0.0.1:8000`, `[::1]:8000`, `localhost:8000` or `unix:/path`."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import os_error_as
from edgert.errors import ConfigInvalid
from edgert.printable import endpoint
from edgert.protocol.listening import listening
from edgert.state_dir import SOCKET_PATH_BYTES_MAX

BACKLOG = 128


@dataclass(frozen=True)
class Address:
    """A Unix socket's `path`, or `host` and `port` (0: any free port)."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect."""
        return self.path is not None or ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return endpoint(self.host, self.port)


def parse_address(text: str, *, allow_remote: bool) -> Address:
    """Parse `text`. Raises ConfigInvalid if it is wrong, or if it is remote without `allow_remote`."""
    if text.startswith("unix:"):
        path = Path(text[len("unix:") :])
        if not path.is_absolute() or len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigInvalid(
                f"[http] listen = {text!r}: give an absolute path of at most {SOCKET_PATH_BYTES_MAX} bytes"
            )
        return Address(path=path)
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        address = Address(host=str(ipaddress.ip_address(host)), port=int(port))
    except ValueError as error:
        raise ConfigInvalid(
            f'[http] listen = {text!r}: give "127.0.0.1:8000", another address, or "unix:/path"'
        ) from error
    if not 0 <= address.port <= 65535:
        raise ConfigInvalid(f"[http] listen = {text!r}: a port is a number up to 65535")
    if not address.is_local and not allow_remote:
        raise ConfigInvalid(
            f"[http] listen = {text!r} can be reached from other machines, without a password: "
            "listen on 127.0.0.1, or set allow_remote = true"
        )
    return address


@contextmanager
def listening_at(address: Address, group: str = "") -> Iterator[socket.socket]:
    """Listen at `address` without blocking; only the owner and `group` can use a Unix socket."""
    if address.path is not None:
        with listening(address.path, 0o660, group) as listener:
            yield listener
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        with os_error_as(ConfigInvalid, f"[http] cannot listen on {address}", "choose another address or port"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
            listener.listen(BACKLOG)
        listener.setblocking(False)
        yield listener
