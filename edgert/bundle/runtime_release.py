"""A release of the runtime: the signed list of wheels for each kind of device.

A host publishes the release into a registry, as an envelope and one blob for each wheel. Devices that follow a channel
fetch the wheels that they lack (edgert.follow.runtime).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edgert.bundle.document import Document
from edgert.bundle.envelope import RUNTIME_PAYLOAD_TYPE, parse_envelope, sign
from edgert.bundle.signing import PublicKey, SigningKey
from edgert.errors import BundleError, NotCompatible
from edgert.typed_json import Closed

TARGETS_MAX = 64
WHEELS_MAX = 512
WHEEL_BYTES_MAX = 8 * 1024**3
# The file name of a wheel becomes a part of a path and of pip's options. It starts with the name and the version of the
# package (PEP 427).
_WHEEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*-[A-Za-z0-9][A-Za-z0-9._+!]*(-[A-Za-z0-9._]+){3,4}\.whl")
_WHEEL_NAME_LENGTH_MAX = 200
_RUNTIME_ID = re.compile(r"[0-9a-f]{16}")
_NUMBERS = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
_WORD = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Wheel(Closed):
    """One wheel; `unpacked_bytes` is the size of the files in the wheel."""

    name: str
    size_bytes: int
    unpacked_bytes: int
    sha256: str


@dataclass(frozen=True)
class RuntimeTarget(Closed):
    """The runtime of one kind of device.

    Attributes:
        python: The version of Python, such as `3.11`.
        machine: The processor, as `uname -m` names it.
        glibc: The oldest glibc that the wheels support, such as `2.28`.
    """

    id: str
    python: str
    machine: str
    glibc: str
    engines: tuple[str, ...]
    extras: tuple[str, ...]
    wheels: tuple[Wheel, ...]

    @property
    def pins(self) -> dict[str, str]:
        """The SHA-256 of each wheel, by its name."""
        return {wheel.name: wheel.sha256 for wheel in self.wheels}


@dataclass(frozen=True)
class RuntimeRelease(Document, Closed):
    """A release: its number, the version of edgert, and the runtime of each kind of device."""

    WHAT, UPDATE = "the runtime", "run edgert bootstrap --upgrade"

    release: int
    edgert: str
    targets: tuple[RuntimeTarget, ...]

    def __post_init__(self) -> None:
        _check(self)

    def target_for(
        self, python: str, machine: str, glibc: str, engines: frozenset[str], extras: frozenset[str]
    ) -> RuntimeTarget:
        """Return the first target that fits the device and has `engines` and `extras`. Raises NotCompatible."""
        for target in self.targets:
            fits = (target.python, target.machine) == (python, machine) and _numbers(target.glibc) <= _numbers(glibc)
            if fits and engines.issubset(target.engines) and extras.issubset(target.extras):
                return target
        had = "; ".join(f"Python {t.python} on {t.machine} with {', '.join(t.engines)}" for t in self.targets)
        raise NotCompatible(
            f"runtime {self.release} is for {had[:300]}; this device has Python {python} on {machine}, glibc {glibc} and "
            f"{', '.join(sorted(engines | extras)) or 'no engine'}: publish a runtime for this device (edgert publish-runtime)"
        )


def sign_runtime(release: RuntimeRelease, key: SigningKey) -> bytes:
    return sign(release.to_bytes(), key, RUNTIME_PAYLOAD_TYPE)


def read_runtime(data: bytes, trusted: tuple[PublicKey, ...]) -> tuple[RuntimeRelease, bytes]:
    """Return the release in an envelope that one of `trusted` signed, and the signed bytes.

    Raises SignatureInvalid and BundleError.
    """
    envelope = parse_envelope(data, RUNTIME_PAYLOAD_TYPE)
    envelope.verify(trusted)
    return RuntimeRelease.from_bytes(envelope.payload), envelope.payload


def _check(release: RuntimeRelease) -> None:
    """Raise BundleError unless every name and limit of `release` is valid."""
    if not 1 <= release.release < 2**53:
        raise BundleError(f"runtime {release.release}: give a whole number from 1 up")
    if not 1 <= len(release.targets) <= TARGETS_MAX or not 1 <= len(release.edgert) <= 40:
        raise BundleError(f"a runtime is for 1 to {TARGETS_MAX} kinds of devices, and names its version of edgert")
    for target in release.targets:
        _check_target(target)


def _check_target(target: RuntimeTarget) -> None:
    what = f"the runtime for Python {target.python[:20]!r} on {target.machine[:20]!r}"
    words: Mapping[str, tuple[str, ...]] = {"engine": target.engines, "extra": target.extras}
    if not (
        _RUNTIME_ID.fullmatch(target.id) and _NUMBERS.fullmatch(target.python) and _NUMBERS.fullmatch(target.glibc)
    ):
        raise BundleError(
            f"{what} has id {target.id[:20]!r}, glibc {target.glibc[:20]!r}: an id is 16 hex digits, a version is two numbers"
        )
    for kind, names in words.items():
        if len(names) > TARGETS_MAX or not all(map(_WORD.fullmatch, names)):
            raise BundleError(f"{what} has an {kind} whose name is not allowed")
    if not target.engines or not 1 <= len(target.wheels) <= WHEELS_MAX:
        raise BundleError(f"{what} needs an engine, and 1 to {WHEELS_MAX} wheels")
    for wheel in target.wheels:
        if len(wheel.name) > _WHEEL_NAME_LENGTH_MAX or not _WHEEL_NAME.fullmatch(wheel.name):
            raise BundleError(f"{what} has a wheel {wheel.name[:120]!r}, which is not a file name of a wheel")
        if not (0 <= wheel.size_bytes <= WHEEL_BYTES_MAX and 0 <= wheel.unpacked_bytes <= 100 * WHEEL_BYTES_MAX):
            raise BundleError(f"{what} has a wheel {wheel.name} whose size is not allowed")
        if not _SHA256.fullmatch(wheel.sha256):
            raise BundleError(f"{what} has a wheel {wheel.name} without a SHA-256")
    if len({wheel.name for wheel in target.wheels}) < len(target.wheels):
        raise BundleError(f"{what} has two wheels with the same name")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")) if _NUMBERS.fullmatch(version) else (0,)
