"""The device under test: one TOML file says how to reach it and what it is.

name = "orin"                       # any name
profile = "jetson-orin-nano"        # of devices/
address = "nvidia@10.0.0.9"         # [USER@]HOST[:PORT]; or virtual = "sshd" for one on this machine
fingerprint = "SHA256:..."          # its SSH host key, as `edgert device add` shows it
identity = "~/.ssh/id_ed25519"      # optional, as are home and state
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VIRTUAL = ("sshd",)


@dataclass(frozen=True)
class Dut:
    """`virtual` names a device that the tests make and remove; otherwise `address` and `fingerprint` are needed."""

    name: str
    profile: str
    address: str = ""
    fingerprint: str = ""
    identity: str = ""
    home: str = ""
    state: str = ""
    virtual: str = ""


def read_dut(path: Path) -> Dut:
    """Raises ConfigInvalid, naming what is missing."""
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
