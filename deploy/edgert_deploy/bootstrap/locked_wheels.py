"""The lock: version and hashes of every wheel that a device may get, as `make lock` resolved them.

One file serves every Python, x86_64 and aarch64. 32-bit ARM has none: its wheels come from piwheels, which builds
them anew.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edgert.errors import ConfigInvalid

SHIPPED = Path(__file__).with_name("locked_wheels.txt")
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Pin:
    """One version of a package, the Pythons and machines that it is for, and pip's options for its hashes."""

    version: str
    marker: Marker | None
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class Lock:
    """The pins by name, several for a package where Pythons need it; `digest` is the file's SHA-256.

    `required` names what a package requires, as the file's comments say: somewhere, with some extra.
    """

    digest: str
    pins: Mapping[str, tuple[Pin, ...]]
    required: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def with_required(self, wanted: Iterable[Requirement], environment: dict[str, str]) -> list[Requirement]:
        """Return `wanted` and all that they require in `environment`, by the lock: perhaps too much."""
        found = list(wanted)
        names = [str(canonicalize_name(each.name)) for each in found]
        for by in names:  # which grows
            for name in sorted(self.required.get(by, frozenset())):
                if name not in names and self._pins(name, environment):
                    names.append(name)
                    found.append(Requirement(name))
        return found

    def lines(self, wanted: Iterable[Requirement], environment: dict[str, str]) -> list[str]:
        """Return pip's line, with version and hashes, for each requirement.

        The lock's markers are judged in `environment`. Raises ConfigInvalid if the lock lacks one, or holds a version
        that the requirement excludes.
        """
        return [self._line(requirement, environment) for requirement in wanted]

    def _line(self, requirement: Requirement, environment: dict[str, str]) -> str:
        name = canonicalize_name(requirement.name)
        pins = self._pins(name, environment)
        if len(pins) != 1 or not requirement.specifier.contains(pins[0].version, prereleases=True):
            versions = ", ".join(pin.version for pin in pins) or "nothing"
            raise ConfigInvalid(
                f"the locked wheels have {versions} where {requirement} is needed: run make lock, or use --unlocked"
            )
        return f"{name}=={pins[0].version} {' '.join(pins[0].hashes)}"

    def _pins(self, name: str, environment: dict[str, str]) -> list[Pin]:
        return [pin for pin in self.pins.get(name, ()) if pin.marker is None or pin.marker.evaluate(environment)]


def read_lock(text: str) -> Lock:
    """Return the lock in a requirements file as uv writes it."""
    pins: dict[str, tuple[Pin, ...]] = {}
    pins_text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for entry in pins_text.replace("\\\n", " ").splitlines():
        head, *hashes = entry.split(" --hash=")
        requirement = Requirement(head.strip())
        (version,) = (each.version for each in requirement.specifier)
        name = canonicalize_name(requirement.name)
        pin = Pin(version, requirement.marker, tuple(f"--hash={each.strip()}" for each in hashes))
        pins[name] = (*pins.get(name, ()), pin)
    return Lock(hashlib.sha256(text.encode()).hexdigest(), pins, _required(text))


def _required(text: str) -> dict[str, frozenset[str]]:
    """Read uv's comments below each package, which name the packages that require it."""
    required: dict[str, set[str]] = {}
    package = ""
    for line in text.splitlines():
        if line[:1].strip() and not line.startswith("#"):
            package = canonicalize_name(line.split("==")[0].strip())
        elif line.lstrip().startswith("#"):
            by = re.sub(r"^via\b", "", line.lstrip(" #")).strip()
            if by and not by.startswith("-") and "(" not in by:  # a constraint or a project is no package
                required.setdefault(canonicalize_name(by), set()).add(package)
    return {name: frozenset(names) for name, names in required.items()}


@functools.cache
def shipped_lock() -> Lock:
    """Return the lock of this edgert."""
    return read_lock(SHIPPED.read_text())
