"""A/B slots of one model: which version is live, which is on trial, which one we go back to.

All that is true of a model's slots stands in one file, `state.json`, and changes by writing a new one
beside it, fsync, rename, fsync of the folder. So a crash at any instant leaves the old state or the new
one. A slot's folder is only ever written while `state.json` does not name it.

On trial, the version serves but is not trusted yet: unless `mark_good` comes in time, the one before it
returns. A reboot during a trial ends it the same way. Where the trial has a gate (edgert.versions.trial_limits), the daemon watches its
limits, and `mark_good` is refused until they held for as long as was asked for.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from edgert.durable import locked, replace_file, sync_folder
from edgert.errors import ConfigInvalid, SlotsBusy, StorageFailed, TransitionRefused
from edgert.versions.trial_limits import TrialLimits

FORMAT = 1
SLOT_NAMES = ("a", "b")
STAGE_NAME = "stage"
TRIAL_S_MAX = 24 * 3600.0
LOCK_S_MAX = 10.0
REASON_LENGTH_MAX = 500
BY_COMMAND = "taken back by a command"
CUT_OFF = "its limits were watched, and that was cut off"
BOOT_ID_VARIABLE = "EDGERT_BOOT_ID"  # 32 hexadecimal digits, as systemd's %b has them


class State(str, Enum):
    """Where a model stands. 'First' states have no good version to go back to."""

    EMPTY = "empty"  # nothing serves
    FIRST_STAGED = "first-staged"  # the first version lies in a slot, nothing serves
    FIRST_TRIAL = "first-trial"  # the first version serves on trial
    STEADY = "steady"  # a good version serves
    STAGED = "staged"  # a good version serves, a new one lies in the other slot
    TRIAL = "trial"  # a new version serves on trial, the good one lies in the other slot


class Event(str, Enum):
    INSTALL = "install"
    ACTIVATE = "activate"
    MARK_GOOD = "mark-good"
    ROLLBACK = "rollback"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.EMPTY,        Event.INSTALL):   State.FIRST_STAGED,
    (State.FIRST_STAGED, Event.INSTALL):   State.FIRST_STAGED,
    (State.FIRST_STAGED, Event.ACTIVATE):  State.FIRST_TRIAL,
    (State.FIRST_STAGED, Event.ROLLBACK):  State.EMPTY,
    (State.FIRST_TRIAL,  Event.MARK_GOOD): State.STEADY,
    (State.FIRST_TRIAL,  Event.ROLLBACK):  State.EMPTY,
    (State.STEADY,       Event.INSTALL):   State.STAGED,
    (State.STEADY,       Event.ROLLBACK):  State.STEADY,
    (State.STAGED,       Event.INSTALL):   State.STAGED,
    (State.STAGED,       Event.ACTIVATE):  State.TRIAL,
    (State.STAGED,       Event.ROLLBACK):  State.STEADY,
    (State.TRIAL,        Event.MARK_GOOD): State.STEADY,
    (State.TRIAL,        Event.ROLLBACK):  State.STEADY,
}  # fmt: skip

ON_TRIAL = (State.FIRST_TRIAL, State.TRIAL)


@dataclass(frozen=True)
class Version:
    """What lies in a slot. `digest` identifies the bundle's whole content; `good` once it was marked so."""

    release: int
    digest: str
    good: bool


@dataclass(frozen=True)
class Trial:
    """Until when a trial lasts, on this boot's clock that also counts suspend (CLOCK_BOOTTIME, seconds)."""

    boot_id: str
    ends_at_s: float

    def left_s(self, clock: BootClock) -> float:
        return seconds_left(clock, self.boot_id, self.ends_at_s)

    def over(self, clock: BootClock) -> bool:
        return not self.left_s(clock)


@dataclass(frozen=True)
class Returned:
    """A version that one went back from, why, and when by the wall clock (seconds since 1970, for people)."""

    release: int
    digest: str
    reason: str
    at_s: float


@dataclass(frozen=True)
class SlotState:
    """The content of `state.json`. `ratchet` is the highest release ever marked good.

    `gate` is the trial's, `returned` the last version that one went back from, until another is marked good.
    """

    state: State = State.EMPTY
    active: str | None = None
    a: Version | None = None
    b: Version | None = None
    trial: Trial | None = None
    ratchet: int = 0
    gate: TrialLimits | None = None
    returned: Returned | None = None

    @property
    def spare(self) -> str:
        """The slot that does not serve; where nothing serves, `a`."""
        return "b" if self.active == "a" else "a"

    def version(self, slot: str | None) -> Version | None:
        return None if slot is None else getattr(self, slot)

    def with_slot(self, slot: str, version: Version | None) -> SlotState:
        return replace(self, a=version) if slot == "a" else replace(self, b=version)


def step(
    before: SlotState,
    event: Event,
    *,
    trial: Trial | None = None,
    gate: TrialLimits | None = None,
    version: Version | None = None,
    reason: str = "",
    now_s: float = 0.0,
) -> SlotState:
    """The state after `event`: pure, so that each row of the table can be tested as data.

    `version` goes with INSTALL, `trial` and `gate` with ACTIVATE, `reason` and `now_s` (wall clock) with ROLLBACK.
    Raises TransitionRefused, naming the way on.
    """
    after = TRANSITIONS.get((before.state, event))
    if after is None:
        raise TransitionRefused(f"cannot {event.value} while the model is {before.state.value}; {_ADVICE[event]}")
    if event is Event.INSTALL:
        return replace(before.with_slot(before.spare, version), state=after)
    if event is Event.ACTIVATE:
        return replace(before, state=after, active=before.spare, trial=trial, gate=gate)
    if event is Event.MARK_GOOD:
        return _marked_good(before, after)
    gone = None if before.state in (State.STAGED, State.FIRST_STAGED) else before.version(before.active)
    after_all = replace(_rolled_back(before, after), gate=None)
    if gone is None:  # nothing of it ever served
        return after_all
    return replace(after_all, returned=Returned(gone.release, gone.digest, reason[:REASON_LENGTH_MAX], now_s))


def _marked_good(before: SlotState, after: State) -> SlotState:
    version = before.version(before.active)
    assert before.active is not None  # a trial always has an active slot, and a version in it
    assert version is not None
    good = before.with_slot(before.active, replace(version, good=True))
    ratchet = max(before.ratchet, version.release)
    return replace(good, state=after, trial=None, gate=None, returned=None, ratchet=ratchet)


def _rolled_back(before: SlotState, after: State) -> SlotState:
    if before.state in (State.STAGED, State.FIRST_STAGED):  # nothing new serves yet: drop what was staged
        return replace(before.with_slot(before.spare, None), state=after)
    if before.state is State.FIRST_TRIAL:
        assert before.active is not None
        return replace(before.with_slot(before.active, None), state=after, active=None, trial=None)
    fallback = before.version(before.spare)
    if fallback is None or not fallback.good:
        raise TransitionRefused("there is no earlier good version to go back to; deploy one")
    if before.state is State.TRIAL:  # what failed its trial is not kept
        assert before.active is not None
        before = before.with_slot(before.active, None)
    return replace(before, state=after, active=before.spare, trial=None)


_ADVICE = {
    Event.INSTALL: "mark-good or rollback the version on trial first",
    Event.ACTIVATE: "install a bundle first",
    Event.MARK_GOOD: "only a version on trial can be marked good: activate it first",
    Event.ROLLBACK: "there is nothing to go back from",
}


class BootClock:
    """Seconds since this boot, suspend included, and the boot's identity.

    Every process must see the same one. In a container, a service with a /proc of its own reads the host's there: so the
    unit hands over what its service manager says.
    """

    def __init__(self) -> None:
        try:
            read = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            read = "unknown"
        self.boot_id = (os.environ.get(BOOT_ID_VARIABLE) or read).replace("-", "")

    def now_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def seconds_left(clock: BootClock, boot_id: str, ends_at_s: float) -> float:
    """Until `ends_at_s` of the boot `boot_id`; 0 where that is over, by a reboot too, or is no number."""
    left_s = ends_at_s - clock.now_s()
    return left_s if boot_id == clock.boot_id and left_s > 0 else 0.0


class SlotStore:
    """The slots of one model on disk: `folder/{state.json, lock, a/, b/, stage/}`."""

    def __init__(self, folder: Path, clock: BootClock | None = None) -> None:
        self.folder = folder
        self.clock = clock or BootClock()

    def read(self) -> SlotState:
        """The present state; EMPTY for a model never installed. Raises StorageFailed on a damaged file."""
        path = self.folder / "state.json"
        try:
            return _from_json(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return SlotState()
        except (
            OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, ConfigInvalid
        ) as error:  # fmt: skip
            raise StorageFailed(
                f"{path} cannot be read ({type(error).__name__}: {error}); remove {self.folder} and deploy the model again"
            ) from error

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Hold the stage against every other install. Raises SlotsBusy where one is under way.

        Apart from the slots' lock: an install may take minutes, and a roll-back must not wait for it.
        """
        with self._holding("install.lock", 0.0):
            yield

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the model's slots against every other process; SlotsBusy if somebody else has them for LOCK_S_MAX.

        Without `wait`, SlotsBusy at once.
        """
        with self._holding("lock", LOCK_S_MAX if wait else 0.0):
            yield

    @contextmanager
    def _holding(self, name: str, wait_s: float) -> Iterator[None]:
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                sync_folder(self.folder.parent)
            lock = locked(self.folder / name, wait_s)
        except BlockingIOError as error:
            raise SlotsBusy(f"another command works on {self.folder.name} at this moment; try again") from error
        except OSError as error:
            raise StorageFailed(f"cannot use {self.folder}: {error.strerror}") from error
        with lock:
            yield

    def slot_folder(self, slot: str) -> Path:
        return self.folder / slot

    def activate(self, trial_s: float, gate: TrialLimits | None = None) -> SlotState:
        """Make the staged version live, on trial for `trial_s` seconds, and for as long as `gate` takes."""
        if not (math.isfinite(trial_s) and trial_s > 0):
            raise ConfigInvalid(f"a trial of {trial_s:g} s; give more than 0 and at most {TRIAL_S_MAX:g} s")
        lasts_s = min(trial_s + (gate.trial_s if gate else 0.0), TRIAL_S_MAX)
        trial = Trial(self.clock.boot_id, self.clock.now_s() + lasts_s)
        with self.locked():
            after = step(self.read(), Event.ACTIVATE, trial=trial, gate=gate)
            self.commit(after)
            return after

    def mark_good(self, *, force: bool = False) -> SlotState:
        """End the trial: the live version is the one to come back to from now on.

        Raises TransitionRefused where its gate has not passed it yet, unless `force`.
        """
        with self.locked():
            before = self.read()
            if before.gate is not None and not before.gate.passed and not force:
                raise TransitionRefused(
                    "its limits are being watched, and have not held for long enough: wait with edgertd trial --wait, "
                    "or keep it regardless of them with --force"
                )
            after = step(before, Event.MARK_GOOD)
            self.commit(after)
            return after

    def rollback(self, *, wait: bool = True, reason: str = BY_COMMAND) -> SlotState:
        """Go back to the good version before, or drop what is staged. `reason` is kept for whoever asks."""
        with self.locked(wait=wait):
            after = step(self.read(), Event.ROLLBACK, reason=reason, now_s=time.time())
            self.commit(after)
            return after

    def fail_trial(self, digest: str, reason: str) -> bool:
        """Go back from the version `digest`; False where it is not on trial (any more), and nothing is changed."""
        with self.locked(wait=False):
            before = self.read()
            active = before.version(before.active)
            if before.state not in ON_TRIAL or active is None or active.digest != digest:
                return False
            self.commit(step(before, Event.ROLLBACK, reason=reason, now_s=time.time()))
            return True

    def begin_watch(self) -> bool:
        """Note that the trial's limits are watched from now on; False where they were before: that watch was cut off."""
        with self.locked(wait=False):
            before = self.read()
            if before.gate is None or before.gate.begun:
                return False
            self.commit(replace(before, gate=replace(before.gate, begun=True)))
            return True

    def pass_gate(self, digest: str) -> SlotState:
        """Note that the limits held: an unattended trial ends well, else the host has `confirm_s` from now on.

        Raises TransitionRefused where another version than `digest` is on trial by now, or none.
        """
        with self.locked(wait=False):
            before = self.read()
            version = before.version(before.active)
            if before.gate is None or version is None or version.digest != digest:
                raise TransitionRefused("what was watched is not on trial any more")
            confirm_s = min(before.gate.confirm_s, TRIAL_S_MAX)
            trial = Trial(self.clock.boot_id, self.clock.now_s() + confirm_s)
            after = replace(before, trial=trial, gate=replace(before.gate, passed=True))
            if before.gate.unattended:
                after = step(before, Event.MARK_GOOD)
            self.commit(after)
            return after

    def expire_trial(self, *, wait: bool = True, unwatched: bool = False) -> bool:
        """Roll back a trial that was not confirmed in time or that a reboot cut short; whether there was one.

        Where it is `unwatched`, as no daemon runs, also one whose limits were being watched: that was cut off.
        """
        with self.locked(wait=wait):
            before = self.read()
            if before.state not in ON_TRIAL:
                return False
            reason = why_expired(before, self.clock)
            if before.trial is not None and not before.trial.over(self.clock):
                if not unwatched or before.gate is None or not before.gate.begun or before.gate.passed:
                    return False
                reason = CUT_OFF
            self.commit(step(before, Event.ROLLBACK, reason=reason, now_s=time.time()))
            return True

    def collect(self, *, wait: bool = True) -> None:
        """Remove what no state names: what a killed install left, and versions that were given up.

        The caller holds the stage (`installing`). What cannot be removed stays for the next time.
        """
        with self.locked(wait=wait):
            state = self.read()
            for name in (STAGE_NAME, *(slot for slot in SLOT_NAMES if state.version(slot) is None)):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def put_staged(self, version: Version) -> SlotState:
        """Move the finished `stage/` into the spare slot and name it there. The caller holds the lock."""
        before = self.read()
        staged = step(before, Event.INSTALL, version=version)
        try:
            # state.json must not name the slot while its folder is replaced.
            without = before.with_slot(before.spare, None)
            if before.state in (State.STAGED, State.FIRST_STAGED):
                without = step(before, Event.ROLLBACK)
            if without != before:
                self.commit(without)
            target = self.slot_folder(before.spare)
            shutil.rmtree(target, ignore_errors=True)
            (self.folder / STAGE_NAME).rename(target)
            sync_folder(self.folder)
        except OSError as error:
            raise StorageFailed(f"cannot fill slot {before.spare} in {self.folder}: {error.strerror}") from error
        self.commit(staged)
        return staged

    def commit(self, state: SlotState) -> None:
        """Replace `state.json`, durably. The caller holds the lock."""
        path = self.folder / "state.json"
        value = {"format": FORMAT, **asdict(state), "state": state.state.value}
        try:
            replace_file(path, json.dumps(value, indent=1).encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {path}: {error.strerror}") from error


def why_expired(slots: SlotState, clock: BootClock) -> str:
    """Why a trial that is over was not confirmed, in words."""
    if slots.trial is not None and slots.trial.boot_id != clock.boot_id:
        return "the device was restarted in the middle of the trial"
    if slots.gate is not None and slots.gate.passed:
        return f"all limits held, but the host did not confirm it within {slots.gate.confirm_s:g} s"
    if slots.gate is not None:
        return "its limits could not be judged before the trial was over"
    return "the trial was not confirmed in time"


def _from_json(value: dict[str, Any]) -> SlotState:
    """What a newer runtime wrote beside it is passed over: after its trial failed, this one must read the file."""
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, this version reads {FORMAT}")
    if value["active"] not in (None, *SLOT_NAMES):
        raise ValueError(f"active is {value['active']!r}")
    trial, gate = _known(Trial, value["trial"]), value.get("gate")
    returned = _known(Returned, value.get("returned"))  # as `gate`, not in files of earlier versions
    return SlotState(
        state=State(value["state"]),
        active=value["active"],
        a=_version(value["a"]),
        b=_version(value["b"]),
        trial=None if trial is None else Trial(str(trial["boot_id"]), float(trial["ends_at_s"])),
        ratchet=int(value["ratchet"]),
        gate=None if gate is None else _gate(gate),
        returned=None if returned is None else Returned(**returned),
    )


def _version(value: dict[str, Any] | None) -> Version | None:
    return None if value is None else Version(int(value["release"]), str(value["digest"]), bool(value["good"]))


def _gate(value: dict[str, Any]) -> TrialLimits:
    """One that a newer runtime wrote and this one cannot judge counts as a watch that was cut off: its version goes back."""
    try:
        return TrialLimits.from_json(value)
    except (KeyError, TypeError, ValueError, ConfigInvalid):
        return TrialLimits({}, begun=True)


def _known(cls: type[Trial] | type[Returned], value: dict[str, Any] | None) -> dict[str, Any] | None:
    names = {field.name for field in fields(cls)}
    return None if value is None else {key: given for key, given in value.items() if key in names}
