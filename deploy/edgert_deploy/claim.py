"""A deployment's claim on a model of a device, seen from the host (on the device: `edgert.claims`).

The token is also noted on this host, under a lock that lives as long as this process. So a second deployment from
the same host is refused without asking the device, and one whose process has died, or whose link was cut before it
could release its claim, does not stand in the way of the next: that one names it as over.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgert.claims import LASTS_S_MAX
from edgert.errors import ConfigInvalid, DeployUnderWay, EdgeRTError
from edgert_deploy.facts import DeviceFacts
from edgert_deploy.inventory import Device
from edgert_deploy.remote import RemoteDaemon
from edgert_deploy.wheelhouse import cache_folder

LASTS_S = 60.0  # commands on the device renew it while they run: this is for what lies between them
SLOW_LINK_BYTES_PER_S = 100_000
TOKEN_BYTES_MAX = 200


@dataclass(frozen=True)
class HeldClaim:
    """`facts` are the device's under the claim."""

    token: str
    facts: DeviceFacts


@contextmanager
def claimed(
    daemon: RemoteDaemon, model: str, send_bytes: int = 0, bytes_per_s: float = SLOW_LINK_BYTES_PER_S
) -> Iterator[HeldClaim]:
    """Hold `model` on the device against every other deployment. Raises DeployUnderWay where another has it.

    What is sent meanwhile may take as long as a slow link needs for it, or one that is limited to `bytes_per_s`.
    """
    lasts_s = min(LASTS_S + send_bytes / min(bytes_per_s, SLOW_LINK_BYTES_PER_S), LASTS_S_MAX)
    with noted(daemon.device, model, f"another deploy of {model}") as note:
        old = os.pread(note, TOKEN_BYTES_MAX, 0).decode(errors="replace")
        instead = ("--instead-of", old) if old.startswith(f"{model}.") else ()
        answer = daemon.call("claim", model, "--by", who(), "--for-s", f"{lasts_s:.0f}", *instead)
        token = str(answer["token"])
        write_note(note, token)
        try:
            yield HeldClaim(token, DeviceFacts.from_status(answer["status"]))
        finally:
            with contextlib.suppress(EdgeRTError):  # a link that is down: it runs out there, and is noted here
                daemon.call("release", token)
                write_note(note, "")


@contextmanager
def noted(device: Device, what: str, other: str) -> Iterator[int]:
    """The file with this host's last token for `what` (a model) there, locked. Raises DeployUnderWay, where it is, naming `other`."""
    folder = cache_folder() / "claims"
    name = hashlib.sha256("\0".join((device.transport, device.address, device.state, what)).encode()).hexdigest()[:24]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigInvalid(
            f"cannot write {folder}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DeployUnderWay(f"{other} is under way on {device.name} from this host; wait for its end") from error
        yield descriptor
    finally:
        os.close(descriptor)


def write_note(descriptor: int, token: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, token.encode(), 0)


def who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
