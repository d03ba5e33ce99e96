"""The follower of one channel: reads the statement from the registry, and advances each model.

Theory of operation: `query_registry` and `_advance_models` read all their data from disk (the record, the stored
statement, the slots) and decide from these data. So after an interrupted round, the next round simply continues. Most
rounds find nothing new, so the modules that fetch and install are imported at their first use.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edgert.bundle.channel import ChannelDevice, Entry, Statement, check_next, read_statement
from edgert.bundle.expiry import expiry_time, time_text
from edgert.bundle.signing import PublicKey
from edgert.checks.channel_status import STALE, ChannelStatus, WantedRelease, read_channel_status, write_channel_status
from edgert.config import DeviceConfig
from edgert.durable import locked, make_private, storing
from edgert.environment import trial_of
from edgert.errors import (
    BundleError,
    ChannelMismatch,
    ChannelTooOld,
    ConfigInvalid,
    DeployUnderWay,
    EdgeRTError,
    EngineFailed,
    EngineMissing,
    FollowerBusy,
    RegistryUnreachable,
    ReleaseTooOld,
    RolledBack,
    TransitionRefused,
)
from edgert.follow.decision import Action, Decision, decide
from edgert.follow.pace import Pace
from edgert.follow.record import RecordStore
from edgert.log import log
from edgert.names import RUNTIME
from edgert.protocol.control import SYNC_S_MAX, ask
from edgert.registry.artifacts import read_channel
from edgert.registry.client import Registry
from edgert.state_dir import StateDir
from edgert.versions.latest_time import LatestTime
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots
from edgert.versions.trial_limits import TrialLimits
from edgert.versions.trust import revoke, trusted_keys

if TYPE_CHECKING:
    from edgert.follow.fetch import ReleaseFetcher
    from edgert.follow.runtime import RuntimeFollower

RESUME_S = 2.0  # the longest pause before a download over a broken connection continues

Report = Callable[[str, str | None, dict[str, Any]], None]  # an event, its model, and its fields
T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """The result of one model's step, as text.

    Attributes:
        soon: Whether another round should start soon.
        error: The reason of a failure; the next round tries again.
        wanted: The entry whose release should be live here, if there is one.
    """

    text: str
    soon: bool = False
    error: EdgeRTError | None = None
    wanted: Entry | None = None


@dataclass(frozen=True)
class Round:
    """The result of a round: the error of the query to the registry, and the step of each model."""

    error: EdgeRTError | None
    steps: tuple[Step, ...]

    @property
    def failure(self) -> EdgeRTError | None:
        return next((error for error in (self.error, *(step.error for step in self.steps)) if error is not None), None)


class ChannelFollower:
    """Follows the channel that `config` names.

    The follower reports events in telemetry with `report`. `home` is the folder with this device's runtimes; None if no
    bootstrap created this folder.
    """

    def __init__(
        self,
        state: StateDir,
        config: DeviceConfig,
        registry: Registry,
        report: Report = lambda event, model, fields: None,
        pace: Pace | None = None,
        latest: LatestTime | None = None,
        jitter: Callable[[], float] = random.random,
        home: Path | None = None,
    ) -> None:
        self._state = state
        self._config = config
        self._registry = registry
        self._report = report
        self._channel = config.follow.channel
        self._source = f"{config.follow.registry} {self._channel}"
        self._device = ChannelDevice(config.site, config.device, config.profile, config.follow.tags)
        self._records = RecordStore(state)
        self._latest = latest or LatestTime(state)
        self._pace = pace or Pace(config.follow)
        self._jitter = jitter
        self._home = home
        self._status = ChannelStatus()  # of this round

    def round(self) -> Round:
        """Read the channel, then advance each model.

        If the registry does not answer, the stored statement stays valid until its expiry. Raises FollowerBusy and
        StorageFailed.
        """
        with self._locked():
            self._status = read_channel_status(self._state, self._config)
            error = self._try_to_query()
            statement = self._statement()
            if error is None:
                assert statement is not None  # a successful request has stored a statement
                asked_at = int(self._latest.now_s())
                self._write_status(asked_at=asked_at, counter=statement.counter, expires=statement.expires, error="")
            steps = self._advance_models(statement)
            self._note_steps(steps, statement)
            self._judge_staleness(statement)
        return Round(error, tuple(steps))

    def query_registry(self) -> None:
        """Read the channel from the registry and store a new statement.

        Raises RegistryError, SignatureInvalid, ChannelInvalid and its subclasses, and StorageFailed. After an error,
        the stored statement stays.
        """
        record, trusted = self._records.read(), self._trusted()
        current = self._records.statement(self._channel, trusted)
        known_digest = record.manifest if current is not None and record.source == self._source else ""
        answer = read_channel(self._registry, self._channel, known_digest)
        if answer is None:
            return
        manifest, envelope = answer
        statement = read_statement(envelope, self._channel, trusted)
        check_next(statement, record.counters.get(self._channel, 0), self._latest.now_s())
        if current is not None and current.counter == statement.counter and current != statement:
            raise ChannelTooOld(
                f"channel {self._channel} has two different statements with the counter {statement.counter}, so the device "
                "keeps the first: publish the channel again"
            )
        # The order matters: after a power cut between two of these steps, the next round only repeats the query.
        revoke(self._state, statement.revoked)
        self._latest.store(expiry_time(statement.issued))
        self._records.accept(envelope, record.with_statement(statement, self._source, manifest))

    def _statement(self) -> Statement | None:
        """Return the stored statement; None before the first statement."""
        return self._records.statement(self._channel, self._trusted())

    def _advance_models(self, statement: Statement | None) -> list[Step]:
        if statement is None:
            return []
        if statement.expired(self._latest.now_s()):
            return [Step(_expired_text(statement))]
        # The runtime comes first. It waits for models on trial, and models wait for the end of the runtime's trial.
        models = sorted(statement.models, key=lambda model: model != RUNTIME)
        return [self._try_to_advance(model, statement.entry_for(model, self._device)) for model in models]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock out other followers during the block. Raises FollowerBusy and StorageFailed."""
        busy = FollowerBusy("another follower runs on this device; see its progress with: edgertd status")
        with storing(f"cannot use {self._state.follow}", busy=busy):
            make_private(self._state.follow)
            make_private(self._state.incoming)
            lock = locked(self._records.lock)
        with lock:
            yield

    def _try_to_query(self) -> EdgeRTError | None:
        """Query the registry; store and return the error of a failed query."""
        try:
            self.query_registry()
        except EdgeRTError as error:
            if not error.retryable and self._status.error != error.message:
                self._report("channel_refused", None, {"code": error.code, "reason": error.message})
            self._write_status(error=error.message)
            return error
        return None

    def _write_status(self, **changes: Any) -> None:
        """Store changes of the status, which `edgertd status` and the daemon read."""
        before, self._status = self._status, replace(self._status, **changes)
        if self._status != before:
            write_channel_status(self._state, self._status)

    def _note_steps(self, steps: list[Step], statement: Statement | None) -> None:
        """Store the step of each model, and log new steps.

        After the statement's expiry, the stored wanted releases stay unchanged.
        """
        before = self._status
        for step in steps:
            if step.text not in before.steps:
                log(f"channel: {step.text}")
        wanted = before.wanted
        if statement is not None and not statement.expired(self._latest.now_s()):
            entries = [step.wanted for step in steps if step.wanted is not None and step.wanted.model != RUNTIME]
            wanted = {entry.model: WantedRelease(entry.release, entry.digest) for entry in entries}
        self._write_status(steps=tuple(step.text for step in steps), wanted=wanted)

    def _judge_staleness(self, statement: Statement | None) -> None:
        """Raise or clear the alarm channel_stale."""
        status, now_s = self._status, self._latest.now_s()
        # The clock may have been far ahead in an earlier round: no time of it may delay the alarm.
        asked_at, begun_at = min(status.asked_at, int(now_s)), min(status.begun_at or int(now_s), int(now_s))
        answered_at, limit_s, stale = asked_at or begun_at, self._config.alarms.channel_stale_s, ""
        if statement is not None and statement.expired(now_s):
            answered_at, limit_s, stale = int(expiry_time(statement.expires)), 0.0, _expired_text(statement)
        elif limit_s and now_s - answered_at > limit_s:
            stale = f"no valid answer of the registry since {time_text(answered_at)}: {status.error}"
        self._write_status(asked_at=asked_at, begun_at=begun_at, stale=stale)
        if bool(stale) != bool(status.stale):
            from edgert.telemetry.alarms import CLEARED, RAISED

            reading = {"alarm": STALE, "value": round(now_s - answered_at), "limit": limit_s}
            self._report(RAISED if stale else CLEARED, None, {**reading, "reason": stale or "the registry answered"})

    def _try_to_advance(self, model: str, entry: Entry | None) -> Step:
        if entry is None:
            return Step(f"{model} has no release for this device")
        try:
            return self._advance_model(entry)
        except DeployUnderWay as error:
            return Step(f"release {entry.release} of {model} waits: {error.message}", soon=True, wanted=entry)
        except EdgeRTError as error:
            return Step(f"release {entry.release} of {model} waits: {error.message}", error=error, wanted=entry)

    def _advance_model(self, entry: Entry) -> Step:
        if entry.model == RUNTIME:
            return self._advance_runtime(entry)
        if self._home is not None and trial_of(self._home):
            raise DeployUnderWay("a new runtime is on trial")
        decision = self._decide(entry)
        path = None
        if decision.action is Action.FETCH:
            try:
                path = self._fetch_with_retries(
                    lambda: self._fetcher.fetch(entry, self._slots(entry), self._trusted(), self._latest.now_s())
                )
            except (BundleError, ChannelMismatch) as error:
                return self._note_refusal(entry, error)
        if decision.action in (Action.FETCH, Action.ACTIVATE):
            from edgert.versions.claims import claiming

            with claiming(self._state, entry.model, f"channel {self._channel}"):
                self._install_and_activate(entry, path)
            decision = self._decide(entry)
        if decision.action is not Action.FETCH and any(self._state.incoming.iterdir()):
            self._fetcher.remove(entry.model)
        return Step(decision.text, decision.action is not Action.NOTHING, wanted=entry if decision.wanted else None)

    def _advance_runtime(self, entry: Entry) -> Step:
        trusted, runtime = self._trusted(), self._runtime
        try:
            decision = runtime.next_step(entry, trusted)
            if decision.action is Action.FETCH:
                self._fetch_with_retries(lambda: runtime.fetch(entry, trusted))
                runtime.try_out(entry, trusted)
                decision = runtime.next_step(entry, trusted)
        except (BundleError, ChannelMismatch, ConfigInvalid, EngineMissing, RolledBack) as error:
            return self._note_refusal(entry, error)
        if decision.action is not Action.FETCH and any(self._state.incoming.iterdir()):
            self._fetcher.remove(RUNTIME)
        return Step(decision.text, soon=decision.action is not Action.NOTHING)

    def _fetch_with_retries(self, fetch: Callable[[], T]) -> T:
        """Call `fetch` until it succeeds. If the connection breaks before a new byte arrives, raise the error."""
        while True:
            before = self._pace.fetched_bytes
            try:
                return fetch()
            except RegistryUnreachable as error:
                if self._pace.fetched_bytes == before:
                    raise
                self._pace.wait(max(RESUME_S * self._jitter(), error.retry_after_s or 0.0))

    def _install_and_activate(self, entry: Entry, path: Path | None) -> None:
        """Install and activate a release; the caller holds the claim.

        Decide again before both steps, because a deployment may have changed the slots in the meantime.
        """
        from edgert.versions.install import install

        try:
            if path is not None and self._decide(entry).action is Action.FETCH:
                install(path, self._state, self._config, latest=self._latest)
            if self._decide(entry).action is Action.ACTIVATE:
                self._activate(entry)
        except (BundleError, ConfigInvalid, EngineFailed, EngineMissing) as error:
            self._note_refusal(entry, error)

    def _activate(self, entry: Entry) -> None:
        """Start the trial. The daemon watches the limits, and then keeps the version or rolls back."""
        from edgert.checks.trial_preparation import measurable_limits

        store = SlotStore(self._state.models / entry.model)
        limits = TrialLimits(dict(entry.limits), entry.watch_s, unattended=True)
        try:
            limits, _ = measurable_limits(limits, store, self._config)
        except TransitionRefused as error:
            raise ConfigInvalid(error.message) from error
        # The record is written first. So this release is not tried a second time, whatever the result of the trial.
        self._records.write(self._records.read().with_attempt(entry))
        store.activate(limits.confirm_s, limits)
        with contextlib.suppress(EdgeRTError):  # the slots have the result
            ask(self._state.control_socket, {"op": "sync", "model": entry.model}, SYNC_S_MAX)

    def _note_refusal(self, entry: Entry, error: EdgeRTError) -> Step:
        """Record that this release cannot be installed here. The next attempt follows when its entry changes."""
        record = self._records.read()
        tried = record.attempt_of(entry)
        replaced = isinstance(error, ReleaseTooOld) and self._has_newer(entry)
        if replaced:
            self._records.write(record.with_attempt(entry))
        elif tried is None or not tried.reason:  # this refusal was not reported yet
            self._records.write(record.with_attempt(entry, error.message))
            fields: dict[str, str | int] = {"release": entry.release, "code": error.code, "reason": error.message}
            self._report("refused", entry.model, fields)
        self._fetcher.remove(entry.model)
        text = f"release {entry.release} of {entry.model} is not tried again: {error.message}"
        return Step(text, wanted=None if replaced else entry)

    def _has_newer(self, entry: Entry) -> bool:
        """Return whether the channel has a newer release of the model, for other devices.

        If the newer release replaced a release with a higher share, some devices keep the replaced release. An older
        release is then the first that selects these devices, and it is no failure that they refuse the older release.
        """
        statement = self._statement()
        entries = () if statement is None else statement.entries
        return any(other.model == entry.model and other.release > entry.release for other in entries)

    def _decide(self, entry: Entry) -> Decision:
        return decide(entry, self._slots(entry), self._records.read().attempt_of(entry))

    def _slots(self, entry: Entry) -> Slots:
        return SlotStore(self._state.models / entry.model).read()

    @cached_property
    def _fetcher(self) -> ReleaseFetcher:
        from edgert.follow.fetch import ReleaseFetcher

        return ReleaseFetcher(self._registry, self._state, self._config, self._pace)

    @cached_property
    def _runtime(self) -> RuntimeFollower:
        from edgert.follow.runtime import RuntimeFollower

        return RuntimeFollower(self._registry, self._state, self._config, self._pace, self._report, self._home)

    def _trusted(self) -> tuple[PublicKey, ...]:
        return trusted_keys(self._state).trusted


def _expired_text(statement: Statement) -> str:
    return f"channel {statement.channel} expired at {statement.expires}, and the registry has no newer statement"
