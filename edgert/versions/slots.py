"""The states of a model's A/B slots, and the events that change them.

Nothing here has side effects; `slot_store` stores the slots. A version on trial serves, but is not trusted yet. If
nobody marks the version good in time, the previous version becomes live again. A reboot ends a trial in the same way.
If the trial has limits (edgert.versions.trial_limits), the daemon watches these limits. `mark-good` is refused until
the limits have held for the whole watch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from edgert.errors import TransitionRefused
from edgert.typed_json import Mistyped, from_json
from edgert.versions.boot_clock import BootClock
from edgert.versions.trial_limits import TrialLimits

FORMAT = 1
SLOT_NAMES = ("a", "b")
REASON_LENGTH_MAX = 500
BY_COMMAND = "rolled back by a command"  # hosts compare the reason of a rollback with this text: it must not change
CUT_OFF = "the watch of its limits was cut off"


class SlotState(str, Enum):
    """The state of a model's slots. In a `FIRST_` state there is no good version for a rollback."""

    EMPTY = "empty"  # nothing serves
    FIRST_STAGED = "first-staged"  # the first version is in a slot, nothing serves
    FIRST_TRIAL = "first-trial"  # the first version serves on trial
    STEADY = "steady"  # a good version serves
    STAGED = "staged"  # a good version serves, a new version is in the other slot
    TRIAL = "trial"  # a new version serves on trial, the good version is in the other slot


class SlotEvent(str, Enum):
    """A command or a decision that changes the slots."""

    INSTALL = "install"
    ACTIVATE = "activate"
    MARK_GOOD = "mark-good"
    ROLLBACK = "rollback"


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.EMPTY,        SlotEvent.INSTALL):   SlotState.FIRST_STAGED,
    (SlotState.FIRST_STAGED, SlotEvent.INSTALL):   SlotState.FIRST_STAGED,
    (SlotState.FIRST_STAGED, SlotEvent.ACTIVATE):  SlotState.FIRST_TRIAL,
    (SlotState.FIRST_STAGED, SlotEvent.ROLLBACK):  SlotState.EMPTY,
    (SlotState.FIRST_TRIAL,  SlotEvent.MARK_GOOD): SlotState.STEADY,
    (SlotState.FIRST_TRIAL,  SlotEvent.ROLLBACK):  SlotState.EMPTY,
    (SlotState.STEADY,       SlotEvent.INSTALL):   SlotState.STAGED,
    (SlotState.STEADY,       SlotEvent.ROLLBACK):  SlotState.STEADY,
    (SlotState.STAGED,       SlotEvent.INSTALL):   SlotState.STAGED,
    (SlotState.STAGED,       SlotEvent.ACTIVATE):  SlotState.TRIAL,
    (SlotState.STAGED,       SlotEvent.ROLLBACK):  SlotState.STEADY,
    (SlotState.TRIAL,        SlotEvent.MARK_GOOD): SlotState.STEADY,
    (SlotState.TRIAL,        SlotEvent.ROLLBACK):  SlotState.STEADY,
}  # fmt: skip

ON_TRIAL = (SlotState.FIRST_TRIAL, SlotState.TRIAL)
_STAGED = (SlotState.FIRST_STAGED, SlotState.STAGED)


@dataclass(frozen=True)
class Version:
    """The version in a slot. `digest` identifies the bundle; `good` means that it was marked good."""

    release: int
    digest: str
    good: bool


@dataclass(frozen=True)
class TrialEnd:
    """The end of a trial, in seconds of the boot clock of `boot_id`."""

    boot_id: str
    ends_at_s: float

    def left_s(self, clock: BootClock) -> float:
        return clock.left_s(self.boot_id, self.ends_at_s)


@dataclass(frozen=True)
class RolledBackVersion:
    """A version that was rolled back, the reason, and the time by the wall clock (seconds since 1970)."""

    release: int
    digest: str
    reason: str
    at_s: float


@dataclass(frozen=True)
class Slots:
    """The slots of one model.

    Attributes:
        live_slot: The slot of the version that serves; None if no version serves.
        ratchet: The highest release that was ever marked good.
        rolled_back: The last version that was rolled back; None after another version was marked good.
    """

    state: SlotState = SlotState.EMPTY
    live_slot: str | None = None
    a: Version | None = None
    b: Version | None = None
    trial: TrialEnd | None = None
    ratchet: int = 0
    limits: TrialLimits | None = None
    rolled_back: RolledBackVersion | None = None

    @property
    def spare_slot(self) -> str:
        """The slot whose version does not serve; `a` if no version serves."""
        return "b" if self.live_slot == "a" else "a"

    @property
    def live(self) -> Version | None:
        return self.version(self.live_slot)

    @property
    def spare(self) -> Version | None:
        return self.version(self.spare_slot)

    @property
    def on_trial(self) -> bool:
        return self.state in ON_TRIAL

    @property
    def staged(self) -> bool:
        """Whether an installed version waits in the spare slot to be activated."""
        return self.state in _STAGED

    def version(self, slot: str | None) -> Version | None:
        return None if slot is None else getattr(self, slot)

    def with_slot(self, slot: str, version: Version | None) -> Slots:
        return replace(self, a=version) if slot == "a" else replace(self, b=version)

    def why_expired(self, clock: BootClock) -> str:
        """Return the reason why a trial has ended without a confirmation."""
        if self.trial is not None and self.trial.boot_id != clock.boot_id:
            return "the device was restarted in the middle of the trial"
        if self.limits is not None and self.limits.passed:
            return f"all limits held, but the host did not confirm the version within {self.limits.confirm_s:g} s"
        if self.limits is not None:
            return "its limits could not be judged before the trial was over"
        return "the trial was not confirmed in time"

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "state": self.state.value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Slots:
        """Return the slots in JSON values and ignore the keys that a newer runtime added.

        After the failed trial of a newer runtime, this runtime must read the file of the newer runtime. Raises
        ValueError, KeyError or TypeError.
        """
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}, this version reads {FORMAT}")
        if value["live_slot"] not in (None, *SLOT_NAMES):
            raise ValueError(f"live_slot is {value['live_slot']!r}")
        slots = from_json(cls, {**value, "limits": None})
        limits = value["limits"]
        return slots if limits is None else replace(slots, limits=_limits(limits))


def step(
    before: Slots,
    event: SlotEvent,
    *,
    trial: TrialEnd | None = None,
    limits: TrialLimits | None = None,
    version: Version | None = None,
    reason: str = "",
    now_s: float = 0.0,
) -> Slots:
    """Return the slots after `event`, without side effects, so tests can check each row of the table.

    Raises TransitionRefused, whose message names the next step, if the table does not allow `event` now.

    Args:
        before: The slots before the event.
        event: The event; the other arguments belong to one event each.
        trial: ACTIVATE: the end of the trial.
        limits: ACTIVATE: the limits of the trial.
        version: INSTALL: the installed version.
        reason: ROLLBACK: the reason, for messages.
        now_s: ROLLBACK: the wall-clock time, in seconds since 1970.
    """
    after = TRANSITIONS.get((before.state, event))
    if after is None:
        raise TransitionRefused(f"cannot {event.value} while the model is {before.state.value}; {_ADVICE[event]}")
    if event is SlotEvent.INSTALL:
        return replace(before.with_slot(before.spare_slot, version), state=after)
    if event is SlotEvent.ACTIVATE:
        return replace(before, state=after, live_slot=before.spare_slot, trial=trial, limits=limits)
    if event is SlotEvent.MARK_GOOD:
        return _marked_good(before, after)
    served = None if before.staged else before.live
    rolled_back = replace(_rolled_back(before, after), limits=None)
    if served is None:
        return rolled_back
    rolled_back_version = RolledBackVersion(served.release, served.digest, reason[:REASON_LENGTH_MAX], now_s)
    return replace(rolled_back, rolled_back=rolled_back_version)


def _marked_good(before: Slots, after: SlotState) -> Slots:
    version = before.live
    assert before.live_slot is not None  # a trial always has a live slot, and a version in it
    assert version is not None
    good = before.with_slot(before.live_slot, replace(version, good=True))
    ratchet = max(before.ratchet, version.release)
    return replace(good, state=after, trial=None, limits=None, rolled_back=None, ratchet=ratchet)


def _rolled_back(before: Slots, after: SlotState) -> Slots:
    if before.staged:  # the staged version does not serve yet: drop it
        return replace(before.with_slot(before.spare_slot, None), state=after)
    assert before.live_slot is not None  # in all other states, a version serves
    if before.state is SlotState.FIRST_TRIAL:
        return replace(before.with_slot(before.live_slot, None), state=after, live_slot=None, trial=None)
    if before.spare is None or not before.spare.good:
        raise TransitionRefused("there is no earlier good version for a rollback; deploy one")
    live_slot = before.spare_slot
    if before.state is SlotState.TRIAL:  # a version that failed its trial is not kept
        before = before.with_slot(before.live_slot, None)
    return replace(before, state=after, live_slot=live_slot, trial=None)


_ADVICE = {
    SlotEvent.INSTALL: "mark the version on trial good or roll it back first",
    SlotEvent.ACTIVATE: "install a bundle first",
    SlotEvent.MARK_GOOD: "only a version on trial can be marked good: activate it first",
    SlotEvent.ROLLBACK: "there is nothing to roll back",
}


def _limits(value: Any) -> TrialLimits:
    """Return the limits. If only a newer runtime can judge the limits, return a watch that was cut off."""
    try:
        return from_json(TrialLimits, value)
    except Mistyped:
        return TrialLimits({}, started=True)
