"""A release of this host's runtime in a registry, for devices that follow a channel.

For each kind of device, the release has the wheels that a bootstrap would send (wheelhouse).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import edgert
from edgert.bundle.runtime_release import RuntimeRelease, RuntimeTarget, Wheel, sign_runtime
from edgert.bundle.signing import SigningKey
from edgert.environment import ID_LENGTH
from edgert.names import RUNTIME
from edgert.registry.artifacts import file_blob, runtime_manifest
from edgert.registry.client import Registry
from edgert_deploy.bootstrap import wheelhouse
from edgert_deploy.bootstrap.locked_wheels import MACHINES, shipped_lock
from edgert_deploy.bootstrap.plan import BootstrapOptions
from edgert_deploy.bootstrap.wheelhouse import Wheelhouse, WheelTarget
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.rollout.publish import OnBytes, OnPause, Release, put_release


def collect_runtime(
    number: int,
    profiles: Sequence[DeviceProfile],
    pythons: Sequence[str],
    options: BootstrapOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[RuntimeRelease, dict[str, Path]]:
    """Collect the wheels of a runtime release; return the release, and its wheels by SHA-256.

    `options` has the engines and the extras. A profile without `machines` gets wheels for all MACHINES. Raises
    ConfigInvalid and EngineMissing.
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
    on_pause: OnPause = lambda text: None,
) -> Release:
    """Sign the release and put it into the registry. `files` maps the SHA-256 of each wheel to its path.

    Raises the errors of `put_release`.
    """
    envelope = sign_runtime(release, key)
    digest = hashlib.sha256(release.to_bytes()).hexdigest()
    wheels = {file_blob(wheel): wheel.sha256 for target in release.targets for wheel in target.wheels}
    signed = Release(RUNTIME, release.release, digest, envelope, runtime_manifest(release, envelope), wheels)
    return put_release(registry, signed, lambda names: [files[name] for name in names], on_bytes, on_pause)


def _target(kind: WheelTarget, house: Wheelhouse) -> RuntimeTarget:
    wheels = tuple(
        Wheel(path.name, path.stat().st_size, house.installed_bytes([path.name]), house.pins[path.name])
        for path in sorted(house.wheels, key=lambda path: path.name)
    )
    return RuntimeTarget(
        house.digest[:ID_LENGTH], kind.python, kind.machine, kind.glibc, house.engines, house.extras, wheels
    )
