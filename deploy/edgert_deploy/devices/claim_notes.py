"""This host's notes of the claims that it took on devices: a token each, under a lock that lives as long as its process.

So a second deployment from the same host is refused without asking the device, and one whose process has died, or whose
link was cut before it could release its claim, does not stand in the way of the next: that one names it as over.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from edgert.durable import locked
from edgert.errors import ConfigInvalid, DeployUnderWay
from edgert_deploy.common.folders import cache_folder
from edgert_deploy.devices.inventory import Device

SLOW_LINK_BYTES_PER_S = 50_000  # a transfer under a claim may be as slow as this
TOKEN_BYTES_MAX = 200


@contextmanager
def noted(device: Device, what: str, other: str) -> Iterator[int]:
    """The file with this host's last token for `what` (a model) there, locked. Raises DeployUnderWay, where it is, naming `other`."""
    folder = cache_folder() / "claims"
    name = hashlib.sha256("\0".join((device.transport, device.address, device.state, what)).encode()).hexdigest()[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        note = locked(folder / name, wait_s=0)
    except BlockingIOError as error:
        raise DeployUnderWay(f"{other} is under way on {device.name} from this host; wait for its end") from error
    except OSError as error:
        raise ConfigInvalid(
            f"cannot write {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
        ) from error
    with note:
        yield note.fileno()


def read_note(descriptor: int) -> str:
    """The last token; "" where none is noted."""
    return os.pread(descriptor, TOKEN_BYTES_MAX, 0).decode(errors="replace")


def write_note(descriptor: int, token: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, token.encode(), 0)


def who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
