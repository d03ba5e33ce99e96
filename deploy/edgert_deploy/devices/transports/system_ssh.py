"""The system's own `ssh`, for interactive use, with the pinned host keys of the inventory.

The keys are in a known_hosts file that only this command uses, under names of EdgeRT's own. No other file, command or
open connection can make ssh accept another key. Other settings and the jump hosts of ~/.ssh/config apply.
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
EXIT_FAILED = 255  # ssh's own exit code if it cannot connect

# Options on the command line take precedence over those in files.
_ONLY_PINNED = (
    # An older ssh ignores these options, which are new in OpenSSH 8.5 (KnownHostsCommand), 7.6 (RemoteCommand) and 8.7.
    ("IgnoreUnknown", "KnownHostsCommand,RemoteCommand,SessionType,StdinNull,ForkAfterAuthentication"),
    ("KnownHostsCommand", "none"),
    ("RemoteCommand", "none"),  # with a RemoteCommand such as tmux, ssh would refuse our own command
    ("SessionType", "default"),  # `none`, for a tunnel, would run no command
    ("StdinNull", "no"),
    ("ForkAfterAuthentication", "no"),
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
# For a command whose output a program reads. There is no terminal, because a terminal would add its echo and line ends.
# There are no forwarded ports, because another ssh may use the same ports.
FOR_A_PROGRAM = ("-T", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no")


@contextmanager
def ssh_command(device: Device, *options: str) -> Iterator[list[str]]:
    """Yield the command that logs in to `device`, with more `options` of ssh.

    You may append words: a shell on the device reads them. Raises ConfigInvalid if ssh is not installed, or if the
    identity is missing.
    """
    program = shutil.which("ssh")
    if program is None:
        raise ConfigInvalid("ssh is not installed here: apt-get install openssh-client")
    if device.identity and not Path(device.identity).expanduser().is_file():
        raise ConfigInvalid(f"identity {device.identity} is missing: give the private key's path")
    with tempfile.TemporaryDirectory(prefix="edgert-ssh-") as folder:
        known_hosts = Path(folder) / "known_hosts"
        lines = [f"{DEVICE_ALIAS} {_one_line(device.host_key)}"]
        if device.jump:
            lines.append(f"{JUMP_ALIAS} {_one_line(device.jump_host_key)}")
        known_hosts.write_text("\n".join((*lines, "")))
        words = [program, *_options(known_hosts, DEVICE_ALIAS), *options, *_identity(device)]
        if device.jump:
            before = shlex.join([program, *_options(known_hosts, JUMP_ALIAS), *_identity(device)]).replace("%", "%%")
            to = shlex.join(_destination(device.jump)).replace("%", "%%")
            words += ["-o", f"ProxyCommand={before} -W [%h]:%p {to}"]  # ssh fills in %h and %p
        yield [*words, *_destination(device.address)]


def _one_line(host_key: str) -> str:
    """Return the kind and the key only: the rest of the text could add lines with other keys."""
    return " ".join(host_key.split()[:2])


def _options(known: Path, alias: str) -> list[str]:
    settings = (("UserKnownHostsFile", f'"{_literal(known)}"'), ("HostKeyAlias", alias), *_ONLY_PINNED)
    return [word for name, value in settings for word in ("-o", f"{name}={value}")]


def _identity(device: Device) -> Sequence[str]:
    """Return the option for the identity. With `-i`, ssh would look for the file before it expands %%."""
    return ["-o", f'IdentityFile="{_literal(Path(device.identity).expanduser())}"'] if device.identity else []


def _literal(path: Path) -> str:
    """Escape a path, because ssh expands %h and similar texts in a path."""
    return str(path).replace("%", "%%")


def _destination(text: str) -> Sequence[str]:
    address = SshAddress.parse(text)
    user = ["-l", address.user] if address.user else []
    port = ["-p", str(address.port)] if address.port else []
    return [*user, *port, "--", address.host]
