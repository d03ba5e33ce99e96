"""A bundle on its way into one device's spare slot: what it lacks is sent as a delta, else the whole; then installed.

Whatever is wrong with a delta (a slot that rotted, an old file that is not what the host thinks) shows in the
device's own check of every hash, and the whole bundle is sent instead. Devices that take no deltas, and this very
machine, get the whole bundle at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgert.checks.status import DeviceStatus
from edgert.errors import BundleCorrupt, Interrupted
from edgert_deploy.common.parallel import Stop
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote import INSTALL_S_MAX, RemoteDaemon
from edgert_deploy.devices.transports import Transport
from edgert_deploy.rollout.delta import Deltas, Has
from edgert_deploy.rollout.plan import Offer

QUICK_S_MAX = 60.0
PROGRESS_BYTES = 1024**2  # smaller transfers are over before anyone reads a line about them
DELTA_FORMATS = (1,)

Say = Callable[[str], None]


@dataclass
class Delivery:
    """One bundle to one device. `sent_bytes` and `send_s` are what it took, `whole_bytes` what the bundle has."""

    bundle: Path
    offer: Offer
    device: Device
    transport: Transport
    daemon: RemoteDaemon
    deltas: Deltas
    say: Say
    stop: Stop
    bytes_per_s: float = 0.0
    sent_bytes: int = 0
    send_s: float = 0.0

    @property
    def whole_bytes(self) -> int:
        return self.offer.size_bytes

    @property
    def remote(self) -> str:
        manifest = self.offer.manifest
        name = f"{manifest.model}-{manifest.release}-{self.offer.digest[:12]}.edgert"
        return f"{self.device.state}/incoming/{name}"

    def send(self, facts: DeviceStatus) -> None:
        """Have what the device lacks lie in its incoming/."""
        begun = time.monotonic()
        self._put(self.chosen(facts))
        self.send_s = time.monotonic() - begun

    def chosen(self, facts: DeviceStatus) -> Path:
        """The file that is sent: a delta of what the device lacks, made now, or the whole bundle."""
        return self._delta(facts) or self.bundle

    def install(self, under: tuple[str, str]) -> None:
        """Have the device verify and unpack what was sent; the whole bundle, where the delta was not enough."""
        try:
            self._install(under)
        except BundleCorrupt as error:
            if self.sent_bytes >= self.whole_bytes:
                raise
            self.say(f"{error.message}; sending the whole bundle instead")
            self._put(self.bundle)
            self._install(under)

    def take_back(self) -> None:
        """Remove what was sent and is not installed."""
        self.transport.run(["rm", "-f", self.remote], QUICK_S_MAX)

    def _delta(self, facts: DeviceStatus) -> Path | None:
        """None where the whole bundle is to be sent."""
        if not self.device.kind.sends_deltas or facts.delta_format not in DELTA_FORMATS:
            return None
        manifest = self.offer.manifest
        has = Has.from_answer(self.daemon.call("have", manifest.model))
        try:
            shipment = self.deltas.make(self.bundle, manifest.target_for(facts.profile, facts.machine), has)
        except OSError as error:
            self.say(f"no delta can be made in {self.deltas.folder} ({error.strerror}): sending the whole bundle")
            return None
        if shipment.size_bytes >= self.whole_bytes:
            return None
        self.say(f"sending {shipment.described()}")
        return shipment.path

    def _put(self, path: Path) -> None:
        progress = _progress(self.say, self.stop)
        self.transport.put(path, self.remote, progress, resumable=True, bytes_per_s=self.bytes_per_s)
        self.sent_bytes += path.stat().st_size

    def _install(self, under: tuple[str, str]) -> None:
        try:
            self.daemon.call("install", self.remote, *under, timeout_s=INSTALL_S_MAX)
        finally:
            self.take_back()


def _progress(say: Say, stop: Stop) -> Callable[[int, int], None]:
    """Tell each tenth of a transfer that takes long enough to be told; end it where the user wants no more."""
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        if stop.asked and done < total:
            raise Interrupted("interrupted while it was sent")
        tenth = 10 * done // total if total else 10
        if total >= PROGRESS_BYTES and tenth > told:
            told = tenth
            say(f"sent {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    return progress
