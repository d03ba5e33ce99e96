"""The progress of a channel, from the reports of its devices in the store.

This module does no I/O. A device reports its channel in `info` and the live release of each model in `deploy`. If it
rolls back or refuses a release, it reports this in an event.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from edgert.bundle.channel import ChannelDevice, Entry, Statement
from edgert.versions.slots import BY_COMMAND, ON_TRIAL

STALE_MS = 15 * 60_000  # a device is stale if its last report is older than this
EVENTS_MS = 90 * 86_400_000  # older events are ignored
FAILED_SHOWN_MAX = 200  # the maximum number of failed devices to list for a release
_ACTIVE = "_active"  # suffix of the `deploy` field with a model's live release


class ReleaseState(Enum):
    """The state of a release on a device. A device that kept the release or rolled it back is never stale."""

    KEPT = "kept"
    ON_TRIAL = "on_trial"
    ROLLED_BACK = "rolled_back"  # the device rolled the release back by itself, or refused it
    BY_COMMAND = "rolled_back_by_command"  # a command on the device rolled the release back: no failure of the release
    WAITING = "waiting"  # the device does not have the release yet
    STALE = "stale"  # the device has neither kept nor rolled back the release, and its reports are overdue


@dataclass(frozen=True)
class DeviceRelease:
    """One device and one release. `reason` says why the device rolled back or refused the release."""

    site: str
    device: str
    state: ReleaseState
    reason: str = ""


@dataclass(frozen=True)
class Progress:
    """One entry of a channel, and the devices that the entry selects."""

    entry: Entry
    devices: tuple[DeviceRelease, ...]

    @property
    def counts(self) -> dict[ReleaseState, int]:
        by_state = Counter(each.state for each in self.devices)
        return {state: by_state[state] for state in ReleaseState}

    @property
    def failed(self) -> list[DeviceRelease]:
        return [each for each in self.devices if each.state is ReleaseState.ROLLED_BACK]

    @property
    def begun(self) -> int:
        """The number of devices that started the release: they keep it, try it, or rolled it back."""
        return sum(each.state not in (ReleaseState.WAITING, ReleaseState.STALE) for each in self.devices)

    @property
    def done(self) -> bool:
        """Whether every device that is not stale has kept the release or rolled it back."""
        return not any(each.state in (ReleaseState.ON_TRIAL, ReleaseState.WAITING) for each in self.devices)


def progress_of(
    statement: Statement, devices: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], now_ms: int
) -> list[Progress]:
    """Return the progress of each entry.

    `devices` is the result of FleetQuery.devices, and `events` (newest first) is the result of FleetQuery.failures.
    """
    failed = _newest_failures(events)
    found: dict[int, list[DeviceRelease]] = {i: [] for i in range(len(statement.entries))}
    for device in devices:
        if device["info"].get("channel") != statement.channel:
            continue
        selected = _channel_device(device)
        for model in statement.models:
            entry = statement.entry_for(model, selected)
            if entry is not None:
                reason = failed.get((selected.site, selected.device, model, entry.release))
                release = _device_release(device, model, f"r{entry.release}", reason, now_ms)
                found[statement.entries.index(entry)].append(release)
    return [Progress(entry, tuple(found[i])) for i, entry in enumerate(statement.entries)]


def releases_of(
    devices: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], now_ms: int
) -> list[dict[str, Any]]:
    """Return a row for each release that devices of a channel serve or rolled back.

    `stale` counts the devices whose reports are overdue and whose last report came during the trial. `failed` lists at
    most FAILED_SHOWN_MAX devices.
    """
    following = {(each["site"], each["device"]): each for each in devices if each["info"].get("channel")}
    failures = _newest_failures(events)
    found: dict[tuple[str, str, str], list[DeviceRelease]] = defaultdict(list)
    for device in following.values():
        for key, version in device["deploy"].items():
            if key.endswith(_ACTIVE) and version != "none":
                model = key.removesuffix(_ACTIVE)
                release = _device_release(device, model, str(version), None, now_ms)
                found[str(device["info"]["channel"]), model, str(version)].append(release)
    for (site, name, model, number), reason in failures.items():
        reporting = following.get((site, name))
        if reporting is not None:
            release = _device_release(reporting, str(model), f"r{number}", reason, now_ms)
            if release.state in (ReleaseState.ROLLED_BACK, ReleaseState.BY_COMMAND):
                found[str(reporting["info"]["channel"]), str(model), f"r{number}"].append(release)
    newest_first = sorted(found, key=lambda key: (*key[:2], -_number(key[2])))
    return [_release_row(*key, found[key]) for key in newest_first]


def _release_row(channel: str, model: str, version: str, devices: Sequence[DeviceRelease]) -> dict[str, Any]:
    counts = Counter(each.state for each in devices)
    failed = [each for each in devices if each.state is ReleaseState.ROLLED_BACK][:FAILED_SHOWN_MAX]
    return {
        "channel": channel,
        "model": model,
        "version": version,
        **{state.value: counts[state] for state in ReleaseState if state is not ReleaseState.WAITING},
        "failed": [{"site": each.site, "device": each.device, "reason": each.reason} for each in failed],
    }


def _number(version: str) -> int:
    digits = version.removeprefix("r")
    return int(digits) if digits.isdecimal() and len(digits) < 20 else 0


def _newest_failures(events: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], str]:
    """Return the reason of the newest failure of each (site, device, model, release)."""
    keys = ("site", "device", "model", "release")
    return {tuple(event.get(key) for key in keys): str(event.get("reason", "")) for event in reversed(events)}


def _device_release(
    device: Mapping[str, Any], model: str, version: str, failed: str | None, now_ms: int
) -> DeviceRelease:
    """Return the state of a version on a device.

    `failed` is the reason why the device rolled the version back; None if the device did not roll it back.
    """
    site, name, deploy = device["site"], device["device"], device["deploy"]
    live = deploy.get(f"{model}{_ACTIVE}") == version
    if live and deploy.get(f"{model}_state") not in ON_TRIAL:
        return DeviceRelease(site, name, ReleaseState.KEPT)
    if not live and failed is not None:
        state = ReleaseState.BY_COMMAND if failed == BY_COMMAND else ReleaseState.ROLLED_BACK
        return DeviceRelease(site, name, state, failed)
    if now_ms - device["heard_ms"] > STALE_MS:
        return DeviceRelease(site, name, ReleaseState.STALE)
    return DeviceRelease(site, name, ReleaseState.ON_TRIAL if live else ReleaseState.WAITING)


def _channel_device(device: Mapping[str, Any]) -> ChannelDevice:
    tags = str(device["info"].get("channel_tags", ""))
    return ChannelDevice(
        device["site"], device["device"], device["profile"], tuple(tag for tag in tags.split(",") if tag)
    )
