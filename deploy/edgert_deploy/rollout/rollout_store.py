"""Rollouts on this host's disk: one JSON file each, with the outcome of every device.

The file is replaced after every device, so a host that dies, or a user who stops, loses nothing. Rollouts are ordered
by a number that only grows: the host's clock may jump.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert.durable import is_locked, locked, replace_file
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.devices.remote import error_class
from edgert_deploy.rollout.deployment import LIVE, REFUSED, UNCHANGED
from edgert_deploy.rollout.waves import Strategy

RUNNING, PAUSED, STOPPED, ABORTED, DONE = "running", "paused", "stopped", "aborted", "done"
KEPT_MAX = 50  # rollouts that are over
LOCK_S_MAX = 0.2


@dataclass(frozen=True)
class Rollout:
    """One bundle to many devices. `outcomes` holds Outcome.as_json by device; an untried device has none."""

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
    number: int = 0  # in the order of this user's rollouts

    @property
    def errors(self) -> list[EdgeRTError | None]:
        """The error of each device's last attempt, in the order of the devices."""
        found = [self.outcomes.get(device, {}).get("error") for device in self.devices]
        return [None if error is None else error_class(error["code"])(error["message"]) for error in found]

    def has_release(self, device: str) -> bool:
        """Whether the release is live on the device, by its last outcome."""
        return self._result(device) in (LIVE, UNCHANGED)

    def refused(self, device: str) -> bool:
        """Whether the device may not take this bundle: foreign key, older release, other target."""
        return self._result(device) == REFUSED

    @property
    def left(self) -> list[str]:
        """The devices that do not have the release."""
        return [device for device in self.devices if not self.has_release(device)]

    @property
    def changed(self) -> list[str]:
        """The devices that this rollout gave the release. On the others a roll-back would undo something else."""
        return [device for device in self.devices if self._result(device) == LIVE]

    @property
    def resumable(self) -> bool:
        """Whether another attempt may help: some device is left that has not refused the bundle."""
        return self.state != ABORTED and not all(self.refused(device) for device in self.left)

    def _result(self, device: str) -> str:
        return str(self.outcomes.get(device, {}).get("result", ""))

    def as_json(self) -> dict[str, Any]:
        limits = None if self.limits is None else vars(self.limits)
        return {**vars(self), "devices": list(self.devices), "strategy": self.strategy.as_json(), "limits": limits}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Rollout:
        given = {**value, "devices": tuple(value["devices"]), "strategy": Strategy.from_json(value["strategy"])}
        limits = value["limits"]
        return cls(**{**given, "limits": None if limits is None else TrialLimits.from_json(limits)})


class RolloutStore:
    """The folder of a user's rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Rollout]:
        """Return every rollout, the newest first. A file that cannot be read is left out; `read` tells why."""
        found = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(ConfigInvalid):
                found.append(self.read(path.stem))
        return sorted(found, key=lambda rollout: rollout.number, reverse=True)

    def read(self, id: str) -> Rollout:
        """Return one rollout. Raises ConfigInvalid."""
        path = self._path(id)
        try:
            return Rollout.from_json(json.loads(path.read_text()))
        except FileNotFoundError as error:
            raise ConfigInvalid(f"there is no rollout {id!r}; list them with: edgert rollout list") from error
        except (OSError, ValueError, KeyError, TypeError, ConfigInvalid) as error:
            raise ConfigInvalid(f"rollout {path} cannot be read: {error}") from error

    def last(self) -> Rollout:
        """Return the newest rollout. Raises ConfigInvalid if there is none."""
        found = self.all()
        if not found:
            raise ConfigInvalid(f"there is no rollout in {self.folder}; start one with: edgert deploy")
        return found[0]

    def write(self, rollout: Rollout) -> None:
        """Replace the rollout's file, at once or not at all. Raises ConfigInvalid."""
        path = self._path(rollout.id)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(rollout.as_json()).encode())
        except OSError as error:
            raise ConfigInvalid(
                f"cannot write the rollout's progress to {path}: {error.strerror}; free some space, or give "
                "EDGERT_CONFIG_DIR a folder that you may write to"
            ) from error

    def new_number(self) -> int:
        """Return the next number in the order of rollouts. Raises ConfigInvalid."""
        counter = self.folder / "counter"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(counter.with_suffix(".lock")):
                known = [rollout.number for rollout in self.all()]
                number = max([int(counter.read_text()) if counter.exists() else 0, *known]) + 1
                replace_file(counter, str(number).encode())
            return number
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"cannot count the rollouts in {self.folder}: {error}") from error

    def tidy(self) -> None:
        """Remove the oldest rollouts that are over, beyond KEPT_MAX."""
        over = [rollout for rollout in self.all() if rollout.state in (DONE, ABORTED)]
        for rollout in over[KEPT_MAX:]:
            self._path(rollout.id).unlink(missing_ok=True)
            self._lock_path(rollout.id).unlink(missing_ok=True)

    @contextmanager
    def at_work(self, id: str) -> Iterator[None]:
        """Hold the rollout's lock, which ends with this process. Raises ConfigInvalid if another process holds it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = locked(self._lock_path(id), LOCK_S_MAX)  # `is_at_work` holds the lock for an instant, too
        except BlockingIOError as error:
            raise ConfigInvalid(
                f"rollout {id} is running in another process; follow it with: edgert rollout status {id}"
            ) from error
        except OSError as error:
            raise ConfigInvalid(f"cannot lock a rollout in {self.folder}: {error.strerror}") from error
        with lock:
            yield

    def is_at_work(self, id: str) -> bool:
        """Return whether a process works on the rollout; leave no trace. Raises ConfigInvalid if that is unknown."""
        try:
            return is_locked(self._lock_path(id))
        except OSError as error:
            raise ConfigInvalid(f"cannot lock a rollout in {self.folder}: {error.strerror}") from error

    def _lock_path(self, id: str) -> Path:
        return self._path(id).with_suffix(".lock")

    def _path(self, id: str) -> Path:
        if not id or Path(id).name != id or id.startswith("."):
            raise ConfigInvalid(f"{id!r} is no id of a rollout; list them with: edgert rollout list")
        return self.folder / f"{id}.json"
