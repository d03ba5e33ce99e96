"""Attackers install bundles again that were signed once, but are no longer valid."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edgert.bundle.expiry import expiry_time
from edgert.config import read_config
from edgert.errors import BundleError, BundleExpired, ReleaseTooOld
from edgert.versions.install import install
from edgert.versions.latest_time import LatestTime
from edgert.versions.slot_store import SlotStore
from tests.support.devices import Device

FAR = "2100-01-01T00:00:00Z"


@pytest.fixture
def device(tmp_path: Path) -> Device:
    device = Device(tmp_path)
    device.prepare()
    return device


def keep(device: Device, bundle: Path, now_s: float | None = None) -> None:
    """Make `bundle` live and good while the clock, which follows no time source, shows `now_s`."""
    clock = LatestTime(device.state, time.time if now_s is None else lambda: now_s, lambda: False)
    install(bundle, device.state, read_config(device.state), latest=clock)
    store = SlotStore(device.state.models / "echo")
    store.activate(60)
    store.mark_good()


def written_in_1970(device: Device) -> None:
    """Set the time of every file of the device to 1970, as a clock that was never set would."""
    for path in device.state.root.rglob("*"):
        os.utime(path, (0, 0))


def test_a_downgrade_replaces_no_release_that_came_after_it(device: Device) -> None:
    downgrade = device.bundle(release=2, downgrade_from=3, expires=FAR)
    keep(device, device.bundle(release=3))
    keep(device, downgrade)
    keep(device, device.bundle(release=4))
    with pytest.raises(ReleaseTooOld, match="older than 4"):
        keep(device, downgrade)


def test_a_downgrade_without_an_expiry_or_from_no_higher_release_is_refused(device: Device) -> None:
    with pytest.raises(BundleError, match="have an expiry"):
        device.bundle(release=2, downgrade_from=3)
    with pytest.raises(BundleError, match="higher release"):
        device.bundle(release=3, downgrade_from=3, expires=FAR)


def test_an_expired_bundle_is_refused_although_the_clock_was_never_set(device: Device) -> None:
    expired = device.bundle(release=2, expires="2020-01-01T00:00:00Z")
    with pytest.raises(BundleExpired):  # the device was set up after the expiry
        keep(device, expired, now_s=0.0)
    written_in_1970(device)
    keep(device, device.bundle(release=1, expires=FAR, signed_at="2020-06-01T00:00:00Z"), now_s=0.0)
    with pytest.raises(BundleExpired, match="the time is 2020-06-01T00:00:00Z"):
        keep(device, expired, now_s=0.0)


def test_an_expired_bundle_is_refused_although_the_clock_is_set_back(device: Device) -> None:
    written_in_1970(device)
    then_s = expiry_time("2026-11-22T08:00:00Z")
    LatestTime(
        device.state, lambda: then_s, lambda: True
    ).store_clock()  # the daemon did this while the clock was right
    with pytest.raises(BundleExpired, match="the time is 2026-11-22T08:00:00Z"):
        keep(device, device.bundle(release=1, expires="2026-11-21T00:00:00Z"), now_s=0.0)
