"""SSH keys of virtual devices: the host key, and the client key that may log in."""

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
    """A virtual device with `host_key` and `client_key` in the folder `keys`."""

    @property
    def keys(self) -> Path:
        raise NotImplementedError

    @property
    def client_key(self) -> Path:
        return self.keys / "client_key"

    @property
    def host_key(self) -> str:
        """Return kind and key, as an inventory stores them."""
        return " ".join((self.keys / "host_key.pub").read_text().split()[:2])

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.host_key)


def new_keys(folder: Path) -> None:
    """Make both key pairs, replacing existing ones. Raises ConfigInvalid."""
    for name in ("host_key", "client_key"):
        new_ssh_key(folder / name)


def new_ssh_key(path: Path, kind: str = "ed25519") -> None:
    """Make a key pair at `path`, replacing an existing one.

    The keys have a comment, because paramiko misreads every second ECDSA key without one.
    """
    for old in (path, path.with_name(path.name + ".pub")):
        old.unlink(missing_ok=True)
    if shutil.which("ssh-keygen") is None:
        raise ConfigInvalid(f"no ssh-keygen is installed here; install it with: sudo {INSTALL}")
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "edgert", "-f", str(path)], check=True)


def greets(host: str, port: int, within_s: float) -> bool:
    """Return whether an SSH server sends its greeting.

    An open port proves nothing: qemu opens it before its machine listens.
    """
    with contextlib.suppress(OSError), socket.create_connection((host, port), within_s) as probe:
        return probe.recv(4) == b"SSH-"
    return False
