"""The lock: the version and the hashes of every wheel that a device may get. `make lock` writes it.

One file has the wheels for all Python versions on x86_64 and aarch64. There is no lock for 32-bit ARM, because its
wheels come from piwheels, which builds the wheels of a version again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edgert.errors import ConfigInvalid

SHIPPED = Path(__file__).with_name("locked_wheels.txt")
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Pin:
    """One version of a package.

    `marker` tells for which Python versions and machines this pin is; None means for all. `hashes` are pip's options
    with the hashes of the wheels.
    """

    version: str
    marker: Marker | None
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class Lock:
    """The pins by package. Some packages have a different pin for each Python version.

    `digest` is the SHA-256 of the lock file.
    """

    digest: str
    pins: Mapping[str, tuple[Pin, ...]]

    def lines(self, wanted: Iterable[Requirement], environment: dict[str, str]) -> list[str]:
        """Return a line of a requirements file for each wanted package, with its version and its hashes.

        `environment` has the values for the lock's markers. Raises ConfigInvalid if the lock lacks a wanted package, or
        has a version of it that the requirement excludes.
        """
        return [self._line(requirement, environment) for requirement in wanted]

    def _line(self, requirement: Requirement, environment: dict[str, str]) -> str:
        name = canonicalize_name(requirement.name)
        pins = [pin for pin in self.pins.get(name, ()) if pin.marker is None or pin.marker.evaluate(environment)]
        if len(pins) != 1 or not requirement.specifier.contains(pins[0].version, prereleases=True):
            versions = ", ".join(pin.version for pin in pins) or "nothing"
            raise ConfigInvalid(
                f"the lock has {versions} where {requirement} is needed: run make lock, or use --unlocked"
            )
        return f"{name}=={pins[0].version} {' '.join(pins[0].hashes)}"


def read_lock(text: str) -> Lock:
    """Read a lock from the text of a requirements file that uv wrote."""
    pins: dict[str, tuple[Pin, ...]] = {}
    pins_text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for entry in pins_text.replace("\\\n", " ").splitlines():
        head, *hashes = entry.split(" --hash=")
        requirement = Requirement(head.strip())
        (version,) = (each.version for each in requirement.specifier)
        name = canonicalize_name(requirement.name)
        pin = Pin(version, requirement.marker, tuple(f"--hash={each.strip()}" for each in hashes))
        pins[name] = (*pins.get(name, ()), pin)
    return Lock(hashlib.sha256(text.encode()).hexdigest(), pins)


@functools.cache
def shipped_lock() -> Lock:
    return read_lock(SHIPPED.read_text())
