"""How far a channel is, by what its devices reported to the store. Pure.

A device names its channel in `info`, the live release of each model in `deploy`, and a release that it went back from or
refused in an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgert.bundle.channel import Entry, Follower, Statement
from edgert.versions.slots import State

# The states of a device with a release. It took it, tries it, went back from it or refused it, does not have it yet, or
# was not heard of since it does not have it.
TOOK, TRIAL, BACK, WAITS, SILENT = STATES = ("took", "trial", "back", "waits", "silent")
SILENT_MS = 15 * 60_000
FAILED = ("rolled_back", "refused")  # events


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
        found = Counter(one.state for one in self.standings)
        return {state: found[state] for state in STATES}

    @property
    def failed(self) -> list[Standing]:
        return [one for one in self.standings if one.state == BACK]

    @property
    def begun(self) -> int:
        """How many devices began with the release."""
        return sum(one.state in (TOOK, TRIAL, BACK) for one in self.standings)

    @property
    def done(self) -> bool:
        """Whether every device that is heard of has decided."""
        return not any(one.state in (TRIAL, WAITS) for one in self.standings)


def progress_of(
    statement: Statement, devices: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], now_ms: int
) -> list[Progress]:
    """Return the progress of each entry. `devices` and `events` (the newest first) are those of FleetQuery."""
    failed: dict[tuple[Any, ...], str] = {}
    for event in reversed(events):
        key = (event["site"], event["device"], event.get("model"), event.get("release"))
        failed[key] = str(event.get("reason", ""))
    found: dict[int, list[Standing]] = {i: [] for i in range(len(statement.entries))}
    for device in devices:
        if device["info"].get("channel") != statement.channel:
            continue
        follower = _follower(device)
        for model in statement.models:
            entry = statement.entry_for(model, follower)
            if entry is not None:
                reason = failed.get((follower.site, follower.device, model, entry.release))
                found[statement.entries.index(entry)].append(_standing(device, follower, entry, reason, now_ms))
    return [Progress(entry, tuple(found[i])) for i, entry in enumerate(statement.entries)]


def _standing(device: Mapping[str, Any], follower: Follower, entry: Entry, failed: str | None, now_ms: int) -> Standing:
    deploy = device["deploy"]
    live = deploy.get(f"{entry.model}_active") == f"r{entry.release}"
    on_trial = deploy.get(f"{entry.model}_state") in (State.TRIAL.value, State.FIRST_TRIAL.value)
    if live:
        return Standing(follower.site, follower.device, TRIAL if on_trial else TOOK)
    if failed is not None:
        return Standing(follower.site, follower.device, BACK, failed)
    silent = now_ms - device["heard_ms"] > SILENT_MS
    return Standing(follower.site, follower.device, SILENT if silent else WAITS)


def _follower(device: Mapping[str, Any]) -> Follower:
    tags = str(device["info"].get("channel_tags", ""))
    return Follower(device["site"], device["device"], device["profile"], tuple(tag for tag in tags.split(",") if tag))
