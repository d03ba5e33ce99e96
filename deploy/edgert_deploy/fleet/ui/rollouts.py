"""The progress of the project's rollouts, from their files, like `edgert rollout status`."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import Any

from edgert.errors import ConfigInvalid
from edgert.typed_json import to_json
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from edgert_deploy.rollout.rollout_store import RolloutStore, Stamp

SHOWN_MAX = 20
DEVICES_SHOWN_MAX = 200  # the maximum number of failed devices to list


class Rollouts:
    """The newest rollouts in `store`, whose folder need not exist. Only one thread may use this object.

    The page checks the files once a second, and files of a large fleet are large. So a file is read only after a
    change.
    """

    def __init__(self, store: RolloutStore) -> None:
        self._store = store
        self._read: dict[str, tuple[Stamp, Rollout, dict[str, Any]]] = {}
        self.revision = 0
        self.shown: list[dict[str, Any]] = []

    def read(self, devices: Set[str]) -> None:
        """Read the changed files. Put the newest rollouts that deploy to any of `devices` into `shown`.

        A change of `shown` increases `revision`.
        """
        read = {}
        for id in self._store.ids():
            with contextlib.suppress(OSError, ConfigInvalid):  # the file was removed or is invalid
                stamp, cached = self._store.stamp(id), self._read.get(id)
                if cached is None or cached[0] != stamp:
                    rollout = self._store.read(id)
                    cached = stamp, rollout, _rollout(rollout)
                read[id] = cached
        self._read = read
        of_fleet = [cached for cached in read.values() if not devices.isdisjoint(cached[1].devices)]
        newest = sorted(of_fleet, key=lambda cached: cached[1].order, reverse=True)[:SHOWN_MAX]
        shown = [{**summary, "state": self._state(stamp, rollout)} for stamp, rollout, summary in newest]
        if shown != self.shown:
            self.shown = shown
            self.revision += 1

    def _state(self, stamp: Stamp, rollout: Rollout) -> str:
        """Return the state. A rollout that is recorded as running, but has no process, was cut off."""
        # Without the permission to lock the rollout, only the recorded state is known.
        with contextlib.suppress(OSError, ConfigInvalid):
            over = rollout.state is RolloutState.RUNNING and self._store.is_at_work(rollout.id) is False
            if over and self._store.stamp(rollout.id) == stamp:
                return RolloutState.CUT_OFF.value
        return rollout.state.value


def _rollout(rollout: Rollout) -> dict[str, Any]:
    names = rollout.devices
    failed = [
        {"device": name, "result": rollout.result(name).value, "error": to_json(rollout.outcomes[name].error)}
        for name in names
        if name in rollout.outcomes and not rollout.has_release(name)
    ]
    return {
        "id": rollout.id,
        "number": rollout.number,
        "model": rollout.model,
        "version": f"r{rollout.release}",
        "state": rollout.state.value,
        "reason": rollout.reason,
        "started_ms": int(rollout.started_at * 1000),
        "devices": len(names),
        "took": sum(rollout.has_release(name) for name in names),
        "failed": failed[:DEVICES_SHOWN_MAX],
        "failed_count": len(failed),
        "waves": [_wave(rollout, wave) for wave in rollout.strategy.split(len(names))],
    }


def _wave(rollout: Rollout, wave: range) -> dict[str, int]:
    names = [rollout.devices[number] for number in wave]
    tried = sum(name in rollout.outcomes for name in names)
    took = sum(rollout.has_release(name) for name in names)
    return {"devices": len(names), "took": took, "failed": tried - took, "left": len(names) - tried}
