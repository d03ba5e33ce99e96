"""The system's own `ssh`, for what a person sits in front of: held to the same pinned keys as everything else.

The keys go into a known_hosts of its own, under names that nothing else bears; no other file, command or open
connection may vouch for another key. What ~/.ssh/config says besides holds, jump hosts too.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import Device, SshAddress

DEVICE_ALIAS = "edgert-device"
JUMP_ALIAS = "edgert-jump-host"
CONNECT_S_MAX = 10
EXIT_FAILED = 255  # what ssh itself ends with where it could not connect

# Options given on the command line come before those of the files.
_ONLY_PINNED = (
    ("IgnoreUnknown", "KnownHostsCommand"),  # new in OpenSSH 8.5
    ("KnownHostsCommand", "none"),
    ("GlobalKnownHostsFile", "/dev/null"),
    ("StrictHostKeyChecking", "yes"),
    ("VerifyHostKeyDNS", "no"),
    ("UpdateHostKeys", "no"),
    ("CheckHostIP", "no"),
    ("NoHostAuthenticationForLocalhost", "no"),
    ("ControlPath", "none"),
    ("ConnectTimeout", str(CONNECT_S_MAX)),
    ("ServerAliveInterval", "5"),
    ("ServerAliveCountMax", "4"),
)


@contextmanager
def ssh_command(device: Device, *, tty: bool = False) -> Iterator[list[str]]:
    """The words that log in to `device`; a command may follow them, and is read by a shell there.

    Raises ConfigInvalid where no ssh is installed or the identity is missing.
    """
    program = shutil.which("ssh")
    if program is None:
        raise ConfigInvalid("no ssh is installed here: apt-get install openssh-client")
    if device.identity and not Path(device.identity).expanduser().is_file():
        raise ConfigInvalid(f"identity {device.identity} is missing: give the private key's path")
    with tempfile.TemporaryDirectory(prefix="edgert-ssh-") as folder:
        known = Path(folder) / "known_hosts"
        lines = [f"{DEVICE_ALIAS} {_one_line(device.host_key)}"]
        if device.jump:
            lines.append(f"{JUMP_ALIAS} {_one_line(device.jump_host_key)}")
        known.write_text("\n".join((*lines, "")))
        words = [program, *_options(known, DEVICE_ALIAS), *(["-t"] if tty else []), *_identity(device)]
        if device.jump:
            before = shlex.join([program, *_options(known, JUMP_ALIAS), *_identity(device)]).replace("%", "%%")
            to = shlex.join(_to(device.jump)).replace("%", "%%")
            words += ["-o", f"ProxyCommand={before} -W [%h]:%p {to}"]  # these two are for ssh to fill in
        yield [*words, *_to(device.address)]


def _one_line(host_key: str) -> str:
    """Kind and key: what follows them, on lines of its own, would be more keys to trust."""
    return " ".join(host_key.split()[:2])


def _options(known: Path, alias: str) -> list[str]:
    given = (("UserKnownHostsFile", f'"{_literal(known)}"'), ("HostKeyAlias", alias), *_ONLY_PINNED)
    return [word for name, value in given for word in ("-o", f"{name}={value}")]


def _identity(device: Device) -> Sequence[str]:
    """Not by -i, which looks for the file under the name that is not filled in."""
    return ["-o", f'IdentityFile="{_literal(Path(device.identity).expanduser())}"'] if device.identity else []


def _literal(path: Path) -> str:
    """ssh fills in %h and the like in paths."""
    return str(path).replace("%", "%%")


def _to(text: str) -> Sequence[str]:
    address = SshAddress.parse(text)
    user = ["-l", address.user] if address.user else []
    port = ["-p", str(address.port)] if address.port else []
    return [*user, *port, "--", address.host]
