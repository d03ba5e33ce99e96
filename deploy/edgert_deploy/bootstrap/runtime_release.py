"""From this host's edgert to a release of the runtime in a registry, for devices that follow a channel.

The wheels are those that a bootstrap sends (wheelhouse), for each kind of device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import edgert
from edgert.bundle.runtime_release import RuntimeRelease, RuntimeTarget, Wheel, sign_runtime
from edgert.bundle.signing import SigningKey
from edgert.environment import ID_LENGTH, RUNTIME
from edgert.errors import ConfigInvalid, NotInRegistry
from edgert.registry.address import digest_of
from edgert.registry.artifacts import EMPTY, release_tag, runtime_manifest, wheel_blob
from edgert.registry.client import Registry
from edgert_deploy.bootstrap import wheelhouse
from edgert_deploy.bootstrap.locked_wheels import MACHINES, shipped_lock
from edgert_deploy.bootstrap.plan import BootstrapOptions
from edgert_deploy.bootstrap.wheelhouse import Wheelhouse, WheelTarget
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.rollout.publish import OnBytes, put_small


@dataclass(frozen=True)
class PublishedRuntime:
    """A release of the runtime in a registry. `digest` is that of the signed bytes; the others name blobs there."""

    release: RuntimeRelease
    digest: str
    envelope: str
    oci_manifest: str
    sent_bytes: int

    @property
    def tag(self) -> str:
        return release_tag(RUNTIME, self.release.release)


def collect_runtime(
    number: int,
    profiles: Sequence[DeviceProfile],
    pythons: Sequence[str],
    options: BootstrapOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[RuntimeRelease, dict[str, Path]]:
    """Collect the wheels for each processor of `profiles` with each of `pythons`; return the release and its files.

    They are those of a bootstrap with the engines and extras of `options`. A profile for any processor stands for MACHINES. The files are named by their SHA-256. Raises ConfigInvalid and
    EngineMissing.
    """
    targets, files = [], {}
    for profile in profiles:
        for machine in profile.machines or MACHINES:
            for python in pythons:
                kind = WheelTarget(python, machine, profile.glibc)
                house = wheelhouse.prepare(
                    kind,
                    options.engines_of(profile),
                    progress,
                    shrink=not options.exactly,
                    lock=shipped_lock(),
                    extras=options.extras,
                )
                targets.append(_target(kind, house))
                files.update({house.pins[wheel.name]: wheel for wheel in house.wheels})
    return RuntimeRelease(number, edgert.__version__, tuple(dict.fromkeys(targets))), files


def publish_runtime(
    registry: Registry,
    release: RuntimeRelease,
    files: dict[str, Path],
    key: SigningKey,
    on_bytes: OnBytes = lambda sent, total: None,
) -> PublishedRuntime:
    """Put the release into the registry: the wheels that it lacks, then the manifest.

    A release that is there already stays as it is. Raises ConfigInvalid where that has other content, and RegistryError.
    """
    envelope = sign_runtime(release, key)
    data, tag = runtime_manifest(release, envelope), release_tag(RUNTIME, release.release)
    sent_bytes = 0
    try:
        there = registry.manifest(tag)
    except NotInRegistry:
        there = None
    if there is None:
        sent_bytes = _send(registry, release, files, on_bytes)
        put_small(registry, EMPTY, envelope)
        registry.put_manifest(tag, data)
    elif there.digest != digest_of(data):
        raise ConfigInvalid(
            f"{registry.repository} has release {release.release} of {RUNTIME} already, with other content or signed by "
            "another key. A release is immutable: give the next number"
        )
    digest = hashlib.sha256(release.to_bytes()).hexdigest()
    return PublishedRuntime(release, digest, _sha256(envelope), _sha256(data), sent_bytes)


def _send(registry: Registry, release: RuntimeRelease, files: dict[str, Path], on_bytes: OnBytes) -> int:
    """Send the wheels that the registry lacks; return their bytes."""
    wheels = {wheel.sha256: wheel for target in release.targets for wheel in target.wheels}
    lacking = [wheel for wheel in wheels.values() if not registry.has(wheel_blob(wheel))]
    total, sent = sum(wheel.size_bytes for wheel in lacking), 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        on_bytes(sent, total)

    for wheel in lacking:
        registry.upload(wheel_blob(wheel), files[wheel.sha256], count)
    return total


def _target(kind: WheelTarget, house: Wheelhouse) -> RuntimeTarget:
    wheels = tuple(
        Wheel(path.name, path.stat().st_size, house.installed_bytes([path.name]), house.pins[path.name])
        for path in sorted(house.wheels, key=lambda path: path.name)
    )
    return RuntimeTarget(
        house.digest[:ID_LENGTH], kind.python, kind.machine, kind.glibc, house.engines, house.extras, wheels
    )


def _sha256(data: bytes) -> str:
    return digest_of(data).removeprefix("sha256:")
