"""The device under test, described by one TOML file.

name = "orin"                       # any name
profile = "jetson-orin-nano"        # of devices/
address = "nvidia@10.0.0.9"         # [USER@]HOST[:PORT]; or virtual = "container" for one on this machine
fingerprint = "SHA256:..."          # its SSH host key, as `edgert device add` shows it
identity = "~/.ssh/id_ed25519"      # optional, like home and state
sudo = true                         # optional: the user becomes root by sudo
power = "uhubctl -l 1-1 -p 2 -a {}" # optional: a command that switches its power; {} stands for on or off
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid
from hil.support import containers, machines
from hil.support.containers import Container, running_container
from hil.support.machines import Machine, running_machine
from hil.support.power import CommandSwitch, PowerSwitch
from hil.support.sshd import SshDevice, running_sshd

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VIRTUAL = ("sshd", "container", "machine-arm64", "machine-amd64")


@dataclass(frozen=True)
class Dut:
    """One device under test: a `virtual` one of the tests, or a real one's `address` and `fingerprint`."""

    name: str
    profile: str
    address: str = ""
    fingerprint: str = ""
    identity: str = ""
    home: str = ""
    state: str = ""
    virtual: str = ""
    power: str = ""
    sudo: bool = False


@dataclass(frozen=True)
class Bench:
    """A device under test that answers over SSH. If possible, `switch` cuts its power."""

    dut: Dut
    switch: PowerSwitch | None


def read_dut(path: Path) -> Dut:
    """Read the TOML file at `path`; raise ConfigInvalid if a field is missing or wrong."""
    try:
        value: dict[str, Any] = tomllib.loads(path.read_text())
        known = {field.name for field in fields(Dut)}
        if unknown := set(value) - known:
            raise ConfigInvalid(f"{path} has unknown keys {sorted(unknown)}; known: {', '.join(sorted(known))}")
        dut = Dut(**value)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigInvalid(f"cannot read the device under test from {path}: {error}") from error
    if dut.virtual and dut.virtual not in VIRTUAL:
        raise ConfigInvalid(f"{path}: virtual must be one of {', '.join(VIRTUAL)}, got {dut.virtual!r}")
    if not dut.virtual and not (dut.address and dut.fingerprint):
        raise ConfigInvalid(f"{path}: give address and fingerprint (edgert device add shows it), or virtual")
    return dut


def why_not(dut: Dut) -> str:
    """Return the reason why this device cannot be made here, or "" if it can or already exists."""
    if dut.virtual == "container":
        return containers.why_not()
    return machines.why_not(_arch(dut)) if dut.virtual.startswith("machine-") else ""


@contextlib.contextmanager
def opened(dut: Dut, folder: Path) -> Iterator[Bench]:
    """Make a virtual device in `folder` and remove it afterwards. Raises ConfigInvalid."""
    if dut.virtual == "sshd":
        with running_sshd(folder) as sshd:
            home = replace(dut, home=str(sshd.home / "edgert"), state=str(sshd.state))
            yield Bench(reached(home, sshd), None)
    elif dut.virtual == "container":
        with running_container(folder) as container:
            yield Bench(reached(dut, container), container)
    elif dut.virtual:
        with running_machine(folder, _arch(dut)) as machine:
            yield Bench(reached(dut, machine), machine)
    else:
        yield Bench(dut, CommandSwitch(dut.power) if dut.power else None)


def reached(dut: Dut, there: SshDevice | Container | Machine, user: str = "") -> Dut:
    """Return `dut` with the address, keys and fingerprint of `there`; `user` logs in instead of root."""
    address = f"{user}@{there.address.partition('@')[2]}" if user else there.address
    return replace(dut, address=address, fingerprint=there.fingerprint, identity=str(there.client_key))


def _arch(dut: Dut) -> str:
    return dut.virtual.removeprefix("machine-")
