"""A rollout, and its record: a file of JSON lines that grows, but never changes a line.

This module does no I/O. Theory of operation. The first line describes the rollout. Each other line is an event: the
outcome of a device, or the state of the whole rollout. Each event has a growing number, so the order of the lines does
not matter. If two copies of a record both grew, the merged record has the lines of both, and every host reads the same
rollout from it. An abort is final, even if another host continued the rollout at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from edgert.errors import ConfigInvalid, DeviceUnreachable, EdgeRTError
from edgert.typed_json import from_json, to_json
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.waves import Strategy

STARTED_AT_MAX = 1e11  # seconds since 1970


class RolloutState(str, Enum):
    """The state of a rollout, in records and JSON."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    ABORTED = "aborted"
    DONE = "done"
    CUT_OFF = "cut off"  # the record says running, but no process works on it; records never contain this state


@dataclass(frozen=True, kw_only=True)
class Head:
    """The fields of a record's first line. Events change only `devices` among these fields.

    `bundle` and `inventory` are names in the project (Project.name_of). `number` orders the project's rollouts.
    """

    id: str
    bundle: str
    digest: str
    model: str
    release: int
    inventory: str
    devices: tuple[str, ...]
    strategy: Strategy
    trial_s: float
    number: int
    started_at: float = 0.0
    bytes_per_s: float = 0.0
    limits: TrialLimits | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.started_at < STARTED_AT_MAX:
            raise ConfigInvalid(f"started_at is {self.started_at}; it is seconds since 1970")


@dataclass(frozen=True, kw_only=True)
class Rollout(Head):
    """A rollout of one bundle to many devices.

    `outcomes` has the last outcome of each device that was tried. `by` is the user and the host that worked on the
    rollout last.
    """

    number: int = 0  # 0 until its record exists
    state: RolloutState = RolloutState.RUNNING
    reason: str = ""
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    by: str = ""

    @property
    def errors(self) -> list[EdgeRTError | None]:
        """The error of each device's last attempt, in the order of the devices."""
        last_errors = [self.outcome(device).error for device in self.devices]
        return [None if error is None else error.as_error() for error in last_errors]

    def outcome(self, device: str) -> Outcome:
        """Return the outcome of the last attempt on a device; `not-begun` for a device that was not tried."""
        return self.outcomes.get(device, Outcome(device, Result.NOT_BEGUN))

    def result(self, device: str) -> Result:
        return self.outcome(device).result

    def has_release(self, device: str) -> bool:
        """Whether the release is live on the device, by its last outcome."""
        return self.result(device) in (Result.LIVE, Result.UNCHANGED)

    def refused(self, device: str) -> bool:
        """Whether the device refused this bundle: an unknown key, an older release or another target."""
        return self.result(device) is Result.REFUSED

    def interrupted(self, device: str, rolled_back: bool) -> bool:
        """Whether the rollout ended for this device because of the user, a lost host or a lost link.

        `rolled_back` tells whether the device rolled the release back without an outcome. In a rollout that still runs,
        this means that the host was lost.
        """
        error = self.outcome(device).error
        lost_link = error is not None and error.code == DeviceUnreachable.code
        unfinished = lost_link or self.result(device) in (Result.NOT_BEGUN, Result.STOPPED, Result.ABANDONED)
        ended = self.state in (RolloutState.STOPPED, RolloutState.DONE)
        return unfinished and (rolled_back or ended) and self.state is not RolloutState.ABORTED

    @property
    def left(self) -> list[str]:
        """The devices that do not have the release."""
        return [device for device in self.devices if not self.has_release(device)]

    @property
    def changed(self) -> list[str]:
        """The devices on which this rollout made the release live, which a rollback must undo."""
        return [device for device in self.devices if self.result(device) is Result.LIVE]

    @property
    def resumable(self) -> bool:
        """Whether another attempt may help: at least one device without the release has not refused it."""
        return self.state is not RolloutState.ABORTED and not all(self.refused(device) for device in self.left)

    @property
    def order(self) -> tuple[int, int, str]:
        """The key that orders rollouts. If two hosts used one number at the same time, the release decides."""
        return self.number, self.release, self.id


@dataclass(frozen=True)
class Record:
    """The rollout that the lines of a record describe, and the number of the newest event."""

    rollout: Rollout
    last: int = 0

    @classmethod
    def read(cls, lines: Iterable[str]) -> Record:
        """Read the lines of a record, in any order. Raises ValueError, KeyError, TypeError or ConfigInvalid."""
        parsed = [(json.loads(line), line) for line in set(lines)]
        heads = [value["rollout"] for value, _ in parsed if "rollout" in value]
        if len(heads) != 1:
            raise ValueError(f"{len(heads)} of its lines describe the rollout; exactly one line must describe it")
        events = sorted((int(value["n"]), line, value) for value, line in parsed if "rollout" not in value)
        rollout = Rollout(**vars(from_json(Head, heads[0])))
        return cls(_with_events(rollout, (event for *_, event in events)), events[-1][0] if events else 0)

    def changed_to(self, rollout: Rollout) -> tuple[Record, list[str]]:
        """Return the record of the changed `rollout`, and the lines to add to this record."""
        events = list(_events(self.rollout, rollout))
        lines = [_line({"n": n, **event}) for n, event in enumerate(events, start=self.last + 1)]
        return Record(rollout, self.last + len(lines)), lines


def new_record(rollout: Rollout) -> tuple[Record, list[str]]:
    """Return the record of a new rollout and its lines."""
    # The first line has none of these fields.
    bare = replace(rollout, state=RolloutState.RUNNING, reason="", by="", outcomes={})
    record, lines = Record(bare).changed_to(rollout)
    head = {entry.name: to_json(getattr(rollout, entry.name)) for entry in fields(Head)}
    return record, [_line({"rollout": head}), *lines]


def _events(before: Rollout, after: Rollout) -> Iterator[dict[str, Any]]:
    for device, outcome in after.outcomes.items():
        if before.outcomes.get(device) != outcome:
            yield {"device": device, "outcome": to_json(outcome)}
    if before.devices != after.devices:
        yield {"devices": list(after.devices)}
    if (before.state, before.reason, before.by) != (after.state, after.reason, after.by):
        yield {"state": after.state.value, "reason": after.reason, "by": after.by}


def _with_events(rollout: Rollout, events: Iterable[Mapping[str, Any]]) -> Rollout:
    """Return the rollout after `events`. Unknown events, which a newer version may write, are ignored."""
    outcomes: dict[str, Outcome] = {}
    for value in events:
        event = from_json(_Event, value)
        if event.outcome is not None:
            outcomes[event.device] = replace(event.outcome, device=event.device)
        elif event.devices is not None:
            rollout = replace(rollout, devices=event.devices)
        elif event.state is not None and rollout.state is not RolloutState.ABORTED:
            rollout = replace(rollout, state=event.state, reason=event.reason, by=event.by)
    return replace(rollout, outcomes=outcomes)


# Git and the store deliver lines of other hosts. These lines are not trusted, so `from_json` checks every event.


@dataclass(frozen=True)
class _Event:
    n: int
    device: str = ""
    outcome: Outcome | None = None
    devices: tuple[str, ...] | None = None
    state: RolloutState | None = None
    reason: str = ""
    by: str = ""


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
