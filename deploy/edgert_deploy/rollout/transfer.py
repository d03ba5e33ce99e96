"""A transfer sends a delta with the files that a device lacks, or sends the whole bundle.

The device checks every hash. If it cannot apply a delta (because a slot is damaged, or an old file has other content
than the host assumes), the host sends the whole bundle instead. A device that accepts no deltas gets the whole bundle
at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgert.bundle.bundle_file import open_bundle
from edgert.checks.status import DELTA_FORMAT, DeviceStatus
from edgert.errors import BundleCorrupt, ConfigInvalid, Interrupted
from edgert_deploy.devices.claims import HeldClaim
from edgert_deploy.devices.remote_daemon import INSTALL_S_MAX, QUICK_S_MAX, RemoteDaemon
from edgert_deploy.devices.transports import LineSink, PutOptions, in_folder
from edgert_deploy.rollout.delta import DeviceFiles
from edgert_deploy.rollout.request import DeployRequest

PROGRESS_BYTES = 1024**2  # smaller transfers end before anyone reads their progress


@dataclass
class Transfer:
    """The transfer of one bundle to one device, with the bytes and the seconds so far."""

    request: DeployRequest
    daemon: RemoteDaemon
    progress: LineSink
    sent_bytes: int = 0
    send_s: float = 0.0

    @property
    def remote(self) -> str:
        offer = self.request.offer
        name = f"{offer.manifest.model}-{offer.manifest.release}-{offer.digest[:12]}.edgert"
        return f"{self.daemon.device.state}/incoming/{name}"

    def planned_bytes(self, facts: DeviceStatus) -> int:
        """Return the number of bytes that `send` would send."""
        planned = replace(self, progress=lambda line: self.progress(f"planned: {line}"))
        return (planned._delta(facts, None) or self.request.bundle).stat().st_size

    def send(self, facts: DeviceStatus, has: Mapping[str, Any] | None = None) -> None:
        """Send the files that the device lacks. They arrive in the device's incoming folder.

        `has` is `HeldClaim.has`. If it is None, this function asks the device for its files. Raises ConfigInvalid if
        the bundle is not the bundle of the request any more.
        """
        self._check_bundle()
        begun = time.monotonic()
        self._upload(self._delta(facts, has) or self.request.bundle)
        self.send_s = time.monotonic() - begun

    def install(self, claim: HeldClaim) -> None:
        """Make the device verify and unpack the sent file. If a delta fails, send the whole bundle."""
        try:
            self._install(claim)
        except BundleCorrupt as error:
            if self.sent_bytes >= self.request.offer.size_bytes:
                raise
            self.progress(f"{error.message}; sending the whole bundle instead")
            self._check_bundle()
            self._upload(self.request.bundle)
            self._install(claim)

    def remove(self) -> None:
        """Remove the sent file from the device."""
        folder, _, name = self.remote.rpartition("/")
        self.daemon.transport.run(in_folder(folder, ["rm", "-f", f"./{name}"]), QUICK_S_MAX)

    def _delta(self, facts: DeviceStatus, has: Mapping[str, Any] | None) -> Path | None:
        """Return a delta for the device; None if it accepts none, or if the whole bundle is not larger."""
        if not self.daemon.device.kind.sends_deltas or facts.delta_format != DELTA_FORMAT:
            return None
        offer, deltas = self.request.offer, self.request.deltas
        files = DeviceFiles.from_answer(self.daemon.call("list-files", offer.manifest.model) if has is None else has)
        try:
            target = offer.manifest.target_for(facts.profile, facts.machine)
            delta = deltas.make(self.request.bundle, target, files)
        except OSError as error:
            self.progress(f"cannot make a delta in {deltas.folder} ({error.strerror}): sending the whole bundle")
            return None
        if delta.size_bytes >= offer.size_bytes:
            return None
        self.progress(f"sending {delta.described()}")
        return delta.path

    def _check_bundle(self) -> None:
        """Raise ConfigInvalid if a build has replaced the bundle: a rollout may pause for hours."""
        path, offer = self.request.bundle, self.request.offer
        with open_bundle(path, trusted=None) as bundle:
            if bundle.digest != offer.digest:
                raise ConfigInvalid(
                    f"{path} changed since this command read it, so it was not installed. Restore the bundle with digest "
                    f"{offer.digest[:12]}, then continue with edgert rollout resume; or deploy the new bundle"
                )

    def _upload(self, path: Path) -> None:
        tenths = 0

        def on_bytes(done: int, total: int) -> None:
            nonlocal tenths
            self.request.on_bytes(self.daemon.device.name, done, total)
            if self.request.stop.asked and done < total:
                raise Interrupted("interrupted during the transfer")
            if total >= PROGRESS_BYTES and 10 * done // total > tenths:
                tenths = 10 * done // total
                self.progress(f"sent {done / 1e6:.1f} of {total / 1e6:.1f} MB")

        limit = self.request.bytes_per_s
        self.daemon.transport.put(path, self.remote, PutOptions(on_bytes, resumable=True, bytes_per_s=limit))
        self.sent_bytes += path.stat().st_size

    def _install(self, claim: HeldClaim) -> None:
        try:
            self._check_bundle()  # a build may have replaced the bundle between the first check and the transfer
            claim.call("install", self.remote, timeout_s=INSTALL_S_MAX)
        finally:
            self.remove()
