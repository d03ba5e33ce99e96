"""The progress of a channel, from its devices' reports in the store. Pure.

A device names its channel in `info`, the live release of each model in `deploy`, and a release that it went back from
or refused in an event.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgert.bundle.channel import ChannelDevice, Entry, Statement
from edgert.versions.slots import State

# The states of a device with a release. It took it, tries it, went back from it or refused it, or does not have it yet.
# `silent` is a device that has not decided and was not heard of for SILENT_MS.
TOOK, TRIAL, BACK, WAITS, SILENT = STATES = ("took", "trial", "back", "waits", "silent")
SILENT_MS = 15 * 60_000
EVENTS_MS = 90 * 86_400_000  # how far back events count
FAILED_SHOWN_MAX = 200  # so many failed devices of a release are named
_ACTIVE = "_active"  # the end of the field of `deploy` that names a model's live release


@dataclass(frozen=True)
class Standing:
    """One device and one release. `reason` says why it went back."""

    site: str
    device: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Progress:
    """One entry of a channel, and the devices that it selects."""

    entry: Entry
    standings: tuple[Standing, ...]

    @property
    def counts(self) -> dict[str, int]:
        by_state = Counter(standing.state for standing in self.standings)
        return {state: by_state[state] for state in STATES}

    @property
    def failed(self) -> list[Standing]:
        return [standing for standing in self.standings if standing.state == BACK]

    @property
    def begun(self) -> int:
        """The number of devices that began with the release."""
        return sum(standing.state in (TOOK, TRIAL, BACK) for standing in self.standings)

    @property
    def done(self) -> bool:
        """Whether every device that reports has decided."""
        return not any(standing.state in (TRIAL, WAITS) for standing in self.standings)


def progress_of(
    statement: Statement, devices: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], now_ms: int
) -> list[Progress]:
    """Return the progress of each entry, by FleetQuery's `devices` and `events` (newest first)."""
    failed = _newest_failures(events)
    standings: dict[int, list[Standing]] = {i: [] for i in range(len(statement.entries))}
    for device in devices:
        if device["info"].get("channel") != statement.channel:
            continue
        selected = _channel_device(device)
        for model in statement.models:
            entry = statement.entry_for(model, selected)
            if entry is not None:
                reason = failed.get((selected.site, selected.device, model, entry.release))
                found = _standing(device, model, f"r{entry.release}", reason, now_ms)
                standings[statement.entries.index(entry)].append(found)
    return [Progress(entry, tuple(standings[i])) for i, entry in enumerate(statement.entries)]


def releases_of(
    devices: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], now_ms: int
) -> list[dict[str, Any]]:
    """Return a row for each release that devices of a channel have or went back from, from reports.

    `silent` counts devices that were last heard of while they tried it. `failed` names at most FAILED_SHOWN_MAX.
    """
    following = {(each["site"], each["device"]): each for each in devices if each["info"].get("channel")}
    failures = _newest_failures(events)
    standings: dict[tuple[str, str, str], list[Standing]] = defaultdict(list)
    for device in following.values():
        for key, version in device["deploy"].items():
            if key.endswith(_ACTIVE) and version != "none":
                model = key.removesuffix(_ACTIVE)
                found = _standing(device, model, str(version), None, now_ms)
                standings[str(device["info"]["channel"]), model, str(version)].append(found)
    for (site, name, model, release), reason in failures.items():
        reporting = following.get((site, name))
        if reporting is not None:
            found = _standing(reporting, str(model), f"r{release}", reason, now_ms)
            if found.state == BACK:
                standings[str(reporting["info"]["channel"]), str(model), f"r{release}"].append(found)
    newest_first = sorted(standings, key=lambda key: (*key[:2], -_number(key[2])))
    return [_release_row(*key, standings[key]) for key in newest_first]


def _release_row(channel: str, model: str, version: str, standings: Sequence[Standing]) -> dict[str, Any]:
    counts = Counter(standing.state for standing in standings)
    failed = [standing for standing in standings if standing.state == BACK][:FAILED_SHOWN_MAX]
    return {
        "channel": channel,
        "model": model,
        "version": version,
        **{state: counts[state] for state in (TOOK, TRIAL, BACK, SILENT)},
        "failed": [{"site": each.site, "device": each.device, "reason": each.reason} for each in failed],
    }


def _number(version: str) -> int:
    digits = version.removeprefix("r")
    return int(digits) if digits.isdecimal() and len(digits) < 20 else 0


def _newest_failures(events: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], str]:
    """Return the newest reason by site, device, model and release."""
    keys = ("site", "device", "model", "release")
    return {tuple(event.get(key) for key in keys): str(event.get("reason", "")) for event in reversed(events)}


def _on_trial(device: Mapping[str, Any], model: str) -> bool:
    return device["deploy"].get(f"{model}_state") in (State.TRIAL.value, State.FIRST_TRIAL.value)


def _standing(device: Mapping[str, Any], model: str, version: str, failed: str | None, now_ms: int) -> Standing:
    """Return where a device stands with a version. `failed` is why it went back from it, if it ever did."""
    silent = now_ms - device["heard_ms"] > SILENT_MS
    if device["deploy"].get(f"{model}{_ACTIVE}") == version:
        state = TOOK if not _on_trial(device, model) else SILENT if silent else TRIAL
        return Standing(device["site"], device["device"], state)
    if failed is not None:
        return Standing(device["site"], device["device"], BACK, failed)
    return Standing(device["site"], device["device"], SILENT if silent else WAITS)


def _channel_device(device: Mapping[str, Any]) -> ChannelDevice:
    tags = str(device["info"].get("channel_tags", ""))
    return ChannelDevice(
        device["site"], device["device"], device["profile"], tuple(tag for tag in tags.split(",") if tag)
    )
