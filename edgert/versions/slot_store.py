"""A/B slots of one model on disk: `folder/{state.json, may-try, lock, install.lock, a/, b/, stage/}`.

`state.json` has the state of the slots. Each change writes a new file beside `state.json`, then calls fsync, rename,
and fsync of the folder. So a crash at any time leaves either the old or the new state. A slot's folder is written only
while `state.json` does not name this slot.

A rollback must work on a full disk, but a new `state.json` needs a free block. So a version on trial is valid only
while the file `may-try` exists. A rollback that cannot write `state.json` removes `may-try`. The next trial creates
`may-try` again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from edgert.durable import LOCK_S_MAX, PRIVATE, locked, make_private, store_file, storing, sync_folder
from edgert.durations import TRIAL_S_MAX
from edgert.errors import ConfigInvalid, SlotsBusy, StorageFailed, TransitionRefused
from edgert.versions.boot_clock import BootClock
from edgert.versions.slots import BY_COMMAND, CUT_OFF, SLOT_NAMES, SlotEvent, Slots, TrialEnd, Version, step
from edgert.versions.trial_limits import TrialLimits

STAGE_NAME = "stage"
NOT_WRITTEN = "it failed its trial, and the reason could not be written: the disk was full"


class SlotStore:
    """The slots of the model whose folder is `folder`.

    With `remembers`, as in the daemon, a rollback takes effect in this process even if it cannot be written to the
    disk. Then `fault` is set until `record` has written the rollback, or another process has changed the slots.
    """

    def __init__(self, folder: Path, clock: BootClock | None = None, *, remembers: bool = False) -> None:
        self.folder = folder
        self.clock = clock or BootClock()
        self.fault: StorageFailed | None = None
        self._remembers = remembers
        self._unwritten: tuple[Slots, Slots] | None = None  # the slots on disk, and the true slots

    def read(self) -> Slots:
        """Return the current slots; EMPTY before the first install. Raises StorageFailed for a damaged file."""
        on_disk = self._read()
        if self._unwritten is not None and self._unwritten[0] == on_disk:
            return self._unwritten[1]
        self._unwritten = self.fault = None
        if not on_disk.on_trial or self._may_try.exists():
            return on_disk
        try:
            after = step(on_disk, SlotEvent.ROLLBACK, reason=NOT_WRITTEN, now_s=time.time())
        except TransitionRefused:  # there is no version to roll back to
            return on_disk
        self._unwritten, self.fault = (on_disk, after), self._not_written("the disk was full; free some space")
        return after

    @property
    def _may_try(self) -> Path:
        return self.folder / "may-try"

    def _read(self) -> Slots:
        path = self.folder / "state.json"
        try:
            return Slots.from_json(json.loads(path.read_bytes()))
        except FileNotFoundError:
            return Slots()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StorageFailed(
                f"{path} cannot be read ({type(error).__name__}: {error}); remove {self.folder} and deploy the model again"
            ) from error

    @contextmanager
    def installing(self) -> Iterator[None]:
        """Lock the stage against every other install. Raises SlotsBusy if another install runs.

        This lock is not the slots' lock, because an install may take minutes, and a rollback must not wait so long.
        """
        with self._holding("install.lock", 0.0):
            yield

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Lock the model's slots against every other process.

        Raises SlotsBusy if another process holds the lock for LOCK_S_MAX. Without `wait`, raises SlotsBusy at once.
        """
        with self._holding("lock", LOCK_S_MAX if wait else 0.0):
            yield

    @contextmanager
    def _holding(self, name: str, wait_s: float) -> Iterator[None]:
        busy = SlotsBusy(f"another command changes {self.folder.name} now: try again")
        with storing(f"cannot use {self.folder}", busy=busy):
            if not self.folder.exists():
                make_private(self.folder)
                sync_folder(self.folder.parent)
            lock = locked(self.folder / name, wait_s)
        with lock:
            yield

    def slot_folder(self, slot: str) -> Path:
        return self.folder / slot

    def live_folder(self, slots: Slots) -> Path:
        """Return the folder of the live version in `slots`, which must have a live version."""
        assert slots.live_slot is not None
        return self.folder / slots.live_slot

    def activate(self, trial_s: float, limits: TrialLimits | None = None) -> Slots:
        """Make the staged version live, on trial for `trial_s` seconds plus the watch of `limits`."""
        if not 0 < trial_s <= TRIAL_S_MAX:
            raise ConfigInvalid(
                f"a trial of {trial_s:g} s is not allowed; give more than 0 and at most {TRIAL_S_MAX:g} s"
            )
        trial = self._trial(trial_s + (limits.trial_s if limits else 0.0))
        with self.locked():
            after = step(self.read(), SlotEvent.ACTIVATE, trial=trial, limits=limits)
            with storing(f"cannot write {self._may_try}"):
                os.close(os.open(self._may_try, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, PRIVATE))
            return self.commit(after)

    def mark_good(self, *, force: bool = False) -> Slots:
        """End the trial and keep the live version, which is now also a version for rollbacks.

        Raises TransitionRefused if the trial's limits have not passed yet, unless `force` is set.
        """
        with self.locked():
            before = self.read()
            if before.limits is not None and not before.limits.passed and not force:
                raise TransitionRefused(
                    "the watch of the trial limits has not ended yet: wait with edgertd trial --wait, or keep the "
                    "version despite the limits with --force"
                )
            return self.commit(step(before, SlotEvent.MARK_GOOD))

    def rollback(
        self, check: Callable[[Slots], None] = lambda before: None, reason: str = BY_COMMAND
    ) -> tuple[Slots, Slots]:
        """Make the previous good version live again, or drop a staged version, for a command.

        Return the slots before and after. `check` gets the slots before, under the lock, and may raise an error.
        """

        def reason_of(before: Slots) -> str:
            check(before)
            return reason

        rolled_back = self._roll_back(reason_of, wait=True)
        assert rolled_back is not None  # there is always a reason
        return rolled_back

    def fail(self, digest: str, reason: str, distrusted: Container[str] = (), *, of_trial: bool = False) -> bool:
        """Roll back from a version that failed; return False if this version is not live any more.

        A rollback must not make a version live whose digest is in `distrusted`. With `of_trial`, the version failed on
        trial; if a command has kept it since, return False. Raises SlotsBusy at once if another process holds the
        slots. Raises TransitionRefused if there is no earlier good version, or if it is distrusted.
        """

        def reason_of(before: Slots) -> str | None:
            if before.live is None or before.live.digest != digest or (of_trial and not before.on_trial):
                return None
            spare = before.spare
            if before.on_trial or (spare is not None and spare.good and spare.digest not in distrusted):
                return reason
            raise TransitionRefused("no earlier version is left for a rollback: deploy a version")

        return self._roll_back(reason_of, wait=False) is not None

    def record(self) -> None:
        """Write a rollback that could not be written before. Raises StorageFailed and SlotsBusy."""
        with self.locked(wait=False):
            slots = self.read()
            if self._unwritten is not None:
                self.commit(slots)

    def start_watch(self) -> bool:
        """Record that the watch of the trial's limits starts. Return False if an earlier one was cut off."""
        with self.locked(wait=False):
            before = self.read()
            if before.limits is None or before.limits.started:
                return False
            self.commit(replace(before, limits=replace(before.limits, started=True)))
            return True

    def pass_limits(self, digest: str) -> Slots:
        """Record that the limits held.

        If the trial is unattended, mark the version good. Otherwise, the host has `confirm_s` to confirm the version.
        Raises TransitionRefused if the version `digest` is no longer on trial.
        """
        with self.locked(wait=False):
            before = self.read()
            if before.limits is None or before.live is None or before.live.digest != digest:
                raise TransitionRefused("the watched version is no longer on trial")
            trial = self._trial(before.limits.confirm_s)
            after = replace(before, trial=trial, limits=replace(before.limits, passed=True))
            return self.commit(step(after, SlotEvent.MARK_GOOD) if before.limits.unattended else after)

    def expire_trial(self, *, wait: bool = True, unwatched: bool = False) -> bool:
        """Roll back a trial that was not confirmed in time or that a reboot ended.

        Return whether this happened. With `unwatched`, no daemon runs. Then also roll back a trial whose watch of the
        limits was cut off: the watch has started, but the limits have not passed.
        """

        def reason_of(before: Slots) -> str | None:
            if not before.on_trial:
                return None
            if before.trial is None or not before.trial.left_s(self.clock):
                return before.why_expired(self.clock)
            limits = before.limits
            return CUT_OFF if unwatched and limits is not None and limits.started and not limits.passed else None

        return self._roll_back(reason_of, wait=wait) is not None

    def collect(self, *, wait: bool = True) -> None:
        """Remove the files that `state.json` does not name: remains of a killed install, and failed versions.

        The caller holds the stage's lock (`installing`). If a folder cannot be removed, the next call tries again.
        """
        with self.locked(wait=wait):
            slots = self._read()  # versions that the file still names must stay
            for name in (STAGE_NAME, *(slot for slot in SLOT_NAMES if slots.version(slot) is None)):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def put_staged(self, version: Version) -> Slots:
        """Move the finished `stage/` into the spare slot and record its version. The caller holds the lock."""
        before = self.read()
        staged = step(before, SlotEvent.INSTALL, version=version)
        with storing(f"cannot fill slot {before.spare_slot} in {self.folder}"):
            # state.json must not name the slot while its folder is replaced.
            unnamed = before.with_slot(before.spare_slot, None)
            if before.staged:
                unnamed = step(before, SlotEvent.ROLLBACK)
            if unnamed != self._read():
                self.commit(unnamed)
            target = self.slot_folder(before.spare_slot)
            shutil.rmtree(target, ignore_errors=True)
            (self.folder / STAGE_NAME).rename(target)
            sync_folder(self.folder)
        return self.commit(staged)

    def commit(self, slots: Slots) -> Slots:
        """Replace `state.json`, durably, and return `slots`. The caller holds the lock."""
        store_file(self.folder / "state.json", json.dumps(slots.as_json(), indent=1).encode())
        self._unwritten = self.fault = None
        return slots

    def _trial(self, lasts_s: float) -> TrialEnd:
        return TrialEnd(self.clock.boot_id, self.clock.now_s() + min(lasts_s, TRIAL_S_MAX))

    def _roll_back(self, reason_of: Callable[[Slots], str | None], *, wait: bool) -> tuple[Slots, Slots] | None:
        """Roll back if `reason_of` returns a reason for the current slots, else return None.

        Return the slots before and after.
        """

        def rolled_back() -> tuple[Slots, Slots] | None:
            before = self.read()
            reason = reason_of(before)
            if reason is None:
                return None
            return before, step(before, SlotEvent.ROLLBACK, reason=reason, now_s=time.time())

        try:
            with self.locked(wait=wait):
                slots = rolled_back()
                if slots is not None:
                    try:
                        self.commit(slots[1])
                    except StorageFailed as error:
                        self._commit_without_a_block(slots[1], error)
        except StorageFailed as error:
            if not self._remembers:
                raise
            slots = rolled_back()  # the lock was not taken, because it may itself need a free block
            if slots is not None:
                self._commit_without_a_block(slots[1], error)
        return slots

    def _commit_without_a_block(self, after: Slots, error: StorageFailed) -> None:
        """Keep a rollback that could not be written because of `error`. Raises `error` if this also fails."""
        before = self._read()
        removed = False
        if before.on_trial:
            with contextlib.suppress(OSError):  # the storage is read-only
                self._may_try.unlink(missing_ok=True)
                sync_folder(self.folder)
                removed = True
        if not (removed or self._remembers):
            raise error
        self._unwritten, self.fault = (before, after), self._not_written(error.message)

    def _not_written(self, reason: str) -> StorageFailed:
        return StorageFailed(f"{self.folder.name} was rolled back, but the rollback could not be written: {reason}")
