"""The keys of a virtual device: its own, and the one that opens it. And whether an SSH server answers somewhere."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from pathlib import Path

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import fingerprint

INSTALL = "apt-get install openssh-server openssh-client"


class HasKeys:
    """What every virtual device is to those who log in: `host_key` and `client_key` lie in `keys`."""

    @property
    def keys(self) -> Path:
        raise NotImplementedError

    @property
    def client_key(self) -> Path:
        return self.keys / "client_key"

    @property
    def host_key(self) -> str:
        """Kind and key, as an inventory has them."""
        return " ".join((self.keys / "host_key.pub").read_text().split()[:2])

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.host_key)


def new_keys(folder: Path) -> None:
    """Both pairs, in place of those that are there. Raises ConfigInvalid."""
    for name in ("host_key", "client_key"):
        new_ssh_key(folder / name)


def new_ssh_key(path: Path, kind: str = "ed25519") -> None:
    """Make a key pair at `path`, in place of one that is there."""
    for old in (path, path.with_name(path.name + ".pub")):
        old.unlink(missing_ok=True)
    if shutil.which("ssh-keygen") is None:
        raise ConfigInvalid(f"no ssh-keygen is installed here; install it with: sudo {INSTALL}")
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", str(path)], check=True)


def greets(host: str, port: int, within_s: float) -> bool:
    """Whether an SSH server says its greeting there. A port alone tells nothing: qemu opens it before its machine does."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), within_s) as probe:
        return probe.recv(4) == b"SSH-"
    return False
