"""The request that all deployments of a bundle share: the bundle, its trial, the access to devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.expiry import check_expiry
from edgert.checks.status import DeviceStatus
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.common.parallel import UserStop
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.transports import LineSink, Transport
from edgert_deploy.rollout.delta import Deltas
from edgert_deploy.rollout.plan import Offer


@dataclass(frozen=True)
class DeployRequest:
    """The deployment of one bundle to devices.

    Attributes:
        trial_s: The longest duration of a trial; a watch of limits adds its own time.
        prepare: Sets up a device that has no EdgeRT, and returns its status; None to refuse such a device.
        bytes_per_s: The highest speed of a transfer; 0 means no limit.
        on_bytes: Several threads call this function with a device's name, the bytes sent so far and their total.
    """

    bundle: Path
    offer: Offer
    trial_s: float
    open_transport: Callable[[Device], Transport]
    prepare: Callable[[Device, Transport, LineSink], DeviceStatus] | None = None
    dry_run: bool = False
    stop: UserStop = field(default_factory=UserStop)
    deltas: Deltas = field(default_factory=Deltas)
    bytes_per_s: float = 0.0
    limits: TrialLimits | None = None
    on_bytes: Callable[[str, int, int], None] = lambda device, done, total: None


def read_offer(path: Path) -> Offer:
    """Verify every byte of the bundle against its manifest; return the bundle's properties.

    The devices check the signature, because each device has its own keys. Raises BundleError for an invalid bundle,
    and for a bundle that has expired by this host's clock.
    """
    with open_bundle(path, trusted=None) as bundle:
        bundle.verify_files()
        manifest = bundle.manifest
        check_expiry(manifest.expires, f"release {manifest.release} of {manifest.model}", time.time())
        return Offer(bundle.manifest, bundle.digest, bundle.envelope.key_ids, path.stat().st_size)
