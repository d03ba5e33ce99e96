"""A rollout over a fleet, wave by wave, as a file: what is planned, what became of each device, where it stands.

Theory of operation: the file is replaced after every device, so that a host that dies, or a user who stops, loses
nothing: `go_on` reads it and does what is left. A device that was in the middle of it then has decided for itself
(its trial ended), and is simply tried again: a plan does only what is missing. A lock that dies with its process
tells a rollout that is at work from one that was cut off.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgert.durable import is_locked, locked, replace_file
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote import error_class
from edgert_deploy.rollout.deployment import DeployRequest, Outcome, deploy
from edgert_deploy.rollout.waves import Strategy

RUNNING, PAUSED, STOPPED, ABORTED, DONE = "running", "paused", "stopped", "aborted", "done"
KEPT_MAX = 50  # rollouts that are over
LOOK_S = 0.2

Say = Callable[[str, str], None]  # (device name, or "" for the rollout itself; a line)


@dataclass(frozen=True)
class Rollout:
    """What the file says. `outcomes` are Outcome.as_json by device; a device without one was not tried yet."""

    id: str
    bundle: str
    digest: str
    model: str
    release: int
    inventory: str
    devices: tuple[str, ...]
    strategy: Strategy
    trial_s: float
    state: str = RUNNING
    reason: str = ""
    started_at: float = 0.0
    bytes_per_s: float = 0.0
    limits: TrialLimits | None = None
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def errors(self) -> list[EdgeRTError | None]:
        """What the devices' last attempts ended with, in the order of the devices."""
        found = [self.outcomes.get(device, {}).get("error") for device in self.devices]
        return [None if error is None else error_class(error["code"])(error["message"]) for error in found]

    def took(self, device: str) -> bool:
        return self.outcomes.get(device, {}).get("result") in ("live", "unchanged")

    @property
    def left(self) -> list[str]:
        return [device for device in self.devices if not self.took(device)]

    def as_json(self) -> dict[str, Any]:
        limits = None if self.limits is None else vars(self.limits)
        return {**vars(self), "devices": list(self.devices), "strategy": self.strategy.as_json(), "limits": limits}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Rollout:
        given = {**value, "devices": tuple(value["devices"]), "strategy": Strategy.from_json(value["strategy"])}
        limits = value.get("limits")
        return cls(**{**given, "limits": None if limits is None else TrialLimits.from_json(limits)})


class RolloutStore:
    """The folder of a user's rollouts: one JSON file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Rollout]:
        """The newest first. A file that cannot be read is left out: `read` says why."""
        found = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(ConfigInvalid):
                found.append(self.read(path.stem))
        return sorted(found, key=lambda rollout: rollout.started_at, reverse=True)

    def read(self, id: str) -> Rollout:
        """Raises ConfigInvalid."""
        path = self._path(id)
        try:
            return Rollout.from_json(json.loads(path.read_text()))
        except FileNotFoundError as error:
            raise ConfigInvalid(f"there is no rollout {id!r}; list them with: edgert rollout list") from error
        except (OSError, ValueError, KeyError, TypeError, ConfigInvalid) as error:
            raise ConfigInvalid(f"rollout {path} cannot be read: {error}") from error

    def last(self) -> Rollout:
        """The newest. Raises ConfigInvalid where there is none."""
        found = self.all()
        if not found:
            raise ConfigInvalid(f"there is no rollout in {self.folder}: edgert deploy begins one")
        return found[0]

    def write(self, rollout: Rollout) -> None:
        """Replace the file at once or not at all. Raises ConfigInvalid."""
        path = self._path(rollout.id)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(rollout.as_json()).encode())
        except OSError as error:
            raise ConfigInvalid(f"cannot write {path}: {error.strerror}; it keeps how far the rollout is") from error

    def new_id(self, model: str, release: int, now_s: float) -> str:
        """An id that is free."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
        stem = f"{model}-r{release}-{stamp}"
        taken = {path.stem for path in self.folder.glob(f"{stem}*.json")}
        return next(id for n in range(len(taken) + 1) if (id := f"{stem}-{n + 1}" if n else stem) not in taken)

    def tidy(self) -> None:
        """Forget the oldest of those that are over."""
        over = [rollout for rollout in self.all() if rollout.state in (DONE, ABORTED)]
        for rollout in over[KEPT_MAX:]:
            self._path(rollout.id).unlink(missing_ok=True)
            self._lock_path(rollout.id).unlink(missing_ok=True)

    @contextmanager
    def at_work(self, id: str) -> Iterator[None]:
        """Hold the rollout. Raises ConfigInvalid where another process does."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = locked(self._lock_path(id), LOOK_S)  # `is_at_work` holds the lock for an instant, too
        except BlockingIOError as error:
            raise ConfigInvalid(
                f"rollout {id} is at work in another process; look with: edgert rollout status {id}"
            ) from error
        except OSError as error:
            raise self._cannot_lock(error) from error
        with lock:
            yield

    def is_at_work(self, id: str) -> bool:
        """Whether some process holds the rollout; leaves no trace. Raises ConfigInvalid where that cannot be told."""
        try:
            return is_locked(self._lock_path(id))
        except OSError as error:
            raise self._cannot_lock(error) from error

    def _lock_path(self, id: str) -> Path:
        return self._path(id).with_suffix(".lock")

    def _cannot_lock(self, error: OSError) -> ConfigInvalid:
        return ConfigInvalid(f"cannot lock a rollout in {self.folder}: {error.strerror}")

    def _path(self, id: str) -> Path:
        if not id or Path(id).name != id or id.startswith("."):
            raise ConfigInvalid(f"{id!r} is no id of a rollout; list them with: edgert rollout list")
        return self.folder / f"{id}.json"


def go_on(
    store: RolloutStore,
    rollout: Rollout,
    deployment: DeployRequest,
    devices: Sequence[Device],
    say: Say,
    sleep: Callable[[float], None] = time.sleep,
) -> Rollout:
    """Do what is left of `rollout` on `devices` (those of the rollout, in its order), and keep the file true.

    The failures of an earlier attempt do not count. Returns the rollout as it stands at the end.
    """
    journal = _Journal(store, replace(rollout, state=RUNNING, reason=""))
    waves = rollout.strategy.split(len(devices))
    for number, wave in enumerate(waves, start=1):
        todo = [devices[i] for i in wave if not journal.rollout.took(devices[i].name)]
        if not todo:
            continue
        if len(waves) > 1:
            say("", f"wave {number} of {len(waves)}: {len(todo)} device{'' if len(todo) == 1 else 's'}")
        journal.begin(len(todo))
        deploy(
            deployment,
            todo,
            say,
            at_once=rollout.strategy.parallel,
            may_begin=lambda: deployment.stop.asked or not journal.too_many(),  # a stop speaks for itself
            on_outcome=journal.add,
        )
        if deployment.stop.asked:
            return journal.end(STOPPED, "stopped by the user")
        if journal.too_many():
            return journal.end(STOPPED, journal.verdict())
        if number < len(waves) and rollout.strategy.pause_s and journal.rollout.left:
            journal.end(PAUSED, f"after wave {number} of {len(waves)}")
            say("", f"waiting {rollout.strategy.pause_s:g} s before the next wave; Ctrl-C stops here")
            until = time.monotonic() + rollout.strategy.pause_s
            while time.monotonic() < until and not deployment.stop.asked:
                sleep(LOOK_S)
            if deployment.stop.asked:
                return journal.end(STOPPED, f"stopped by the user after wave {number}")
            journal.end(RUNNING, "")
    return journal.end(DONE, "" if not journal.rollout.left else f"{len(journal.rollout.left)} devices did not take it")


class _Journal:
    """The rollout under way and its file. Every method may be called from any thread."""

    def __init__(self, store: RolloutStore, rollout: Rollout) -> None:
        self._store, self.rollout = store, rollout
        self._begun = self._failed = 0
        self._lock = threading.Lock()
        store.write(rollout)

    def begin(self, count: int) -> None:
        """A wave of so many devices begins."""
        self._begun += count

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self._failed += outcome.error is not None
            outcomes = {**self.rollout.outcomes, outcome.device: outcome.as_json()}
            self.rollout = replace(self.rollout, outcomes=outcomes)
            self._store.write(self.rollout)

    def too_many(self) -> bool:
        limit = self.rollout.strategy.failures_max
        return limit is not None and limit.exceeded(self._failed, self._begun)

    def verdict(self) -> str:
        return f"{self._failed} of {self._begun} devices failed, more than --max-failures {self.rollout.strategy.failures_max}"

    def end(self, state: str, reason: str) -> Rollout:
        with self._lock:
            self.rollout = replace(self.rollout, state=state, reason=reason)
            self._store.write(self.rollout)
            return self.rollout
