"""A real OpenSSH server as a device: a free loopback port, its own host key and home folder, stopped by its pid.

It is the lightest virtual device: no root, no emulator, 1.3 MB each. It shares this machine's kernel and files. It has
no SFTP, like many small systems.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.inventory import Device
from hil.support.keys import INSTALL, HasKeys, greets, new_keys
from tests.support.servers.ports import free_port

START_S_MAX = 120.0

_CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
MaxStartups 100:30:200
LogLevel VERBOSE
SetEnv HOME={home} PATH={path}
"""


@dataclass
class SshDevice(HasKeys):
    """One running sshd. `client_key` may log in; `home` is $HOME of its sessions."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def keys(self) -> Path:
        return self.folder

    @property
    def address(self) -> str:
        return f"{pwd.getpwuid(os.getuid()).pw_name}@127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def device(self, name: str = "board", port: int | None = None, host_key: str = "") -> Device:
        """Return this server as an inventory entry; `port` is the port of a relay in front of it."""
        return Device(
            name=name,
            transport="ssh",
            address=self.address if port is None else self.address.replace(f":{self.port}", f":{port}"),
            profile="this-machine",
            state=str(self.state),
            home=str(self.home / "edgert"),
            host_key=host_key or self.host_key,
            identity=str(self.client_key),
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(START_S_MAX)


@contextlib.contextmanager
def running_sshd(folder: Path, path: str = "/usr/local/bin:/usr/bin:/bin") -> Iterator[SshDevice]:
    """Run a server with all its files in `folder`. Sessions get `path` as their PATH."""
    (folder / "home").mkdir(parents=True)
    new_keys(folder)
    shutil.copy(folder / "client_key.pub", folder / "authorized_keys")
    device = start_sshd(folder, path)
    try:
        yield device
    finally:
        device.stop()


def start_sshd(
    folder: Path, path: str = "/usr/local/bin:/usr/bin:/bin", port: int | None = None, more: str = "", text: str = ""
) -> SshDevice:
    """Start a server with the keys in `folder`, on `port` if given; `text` replaces its configuration."""
    program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        raise ConfigInvalid(f"no sshd is installed here; install it with: sudo {INSTALL}")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd does not start as root without it
    port = port or free_port()
    (folder / "sshd_config").write_text(
        text or _CONFIG.format(folder=folder, port=port, home=folder / "home", path=path) + more
    )
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [program, "-D", "-e", "-f", str(folder / "sshd_config")], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    device = SshDevice(folder, port, process)
    _wait_for_banner(device)
    return device


def _wait_for_banner(device: SshDevice) -> None:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        if device.process.poll() is not None:
            raise ConfigInvalid(f"sshd ended with {device.process.returncode}: {device.log[-2000:]}")
        if greets("127.0.0.1", device.port, 1):
            return
        time.sleep(0.02)
    device.stop()
    raise ConfigInvalid(f"sshd did not answer within {START_S_MAX:.0f} s: {device.log[-2000:]}")
