"""The progress of this host's rollouts, from their files (as `edgert rollout status`)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid
from edgert_deploy.rollout.rollout_store import RUNNING, Rollout, RolloutStore

SHOWN_MAX = 20
DEVICES_SHOWN_MAX = 200  # of those that failed
CUT_OFF = "cut off"

_Mark = tuple[int, int, int]


class Rollouts:
    """The newest rollouts in `folder`, which need not exist. Only one thread may use it.

    A file is read only when it changed: those of a large fleet are large, and this looks once a second.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = RolloutStore(folder)
        self._read: dict[Path, tuple[_Mark, dict[str, Any]]] = {}
        self.revision = 0
        self.shown: list[dict[str, Any]] = []

    def look(self) -> None:
        """Read the changed files; `revision` grows if there are any."""
        read = {}
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, ConfigInvalid):  # it was removed, or is invalid
                mark, kept = _mark(path), self._read.get(path)
                read[path] = kept if kept and kept[0] == mark else (mark, _rollout(self._store.read(path.stem)))
        self._read = read
        newest = sorted(read, key=lambda path: read[path][1]["number"], reverse=True)[:SHOWN_MAX]
        found = [{**read[path][1], "state": self._state(path, *read[path])} for path in newest]
        if found != self.shown:
            self.shown = found
            self.revision += 1

    def _state(self, path: Path, mark: _Mark, said: dict[str, Any]) -> str:
        """Return the state; a rollout that is marked as running and that no process works on was cut off."""
        with contextlib.suppress(
            OSError, ConfigInvalid
        ):  # without the right to lock it, only the file's own state is known
            if said["state"] == RUNNING and not self._store.is_at_work(path.stem) and _mark(path) == mark:
                return CUT_OFF
        return str(said["state"])


def _mark(path: Path) -> _Mark:
    """Return a mark that changes with each write, because the file is replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _rollout(rollout: Rollout) -> dict[str, Any]:
    names = rollout.devices
    results = {name: str(rollout.outcomes.get(name, {}).get("result", "held")) for name in names}
    failed = [
        {"device": name, "result": results[name], "error": rollout.outcomes[name].get("error")}
        for name in names
        if name in rollout.outcomes and not rollout.has_release(name)
    ]
    return {
        "id": rollout.id,
        "number": rollout.number,
        "model": rollout.model,
        "version": f"r{rollout.release}",
        "state": rollout.state,
        "reason": rollout.reason,
        "started_ms": int(rollout.started_at * 1000),
        "devices": len(names),
        "took": sum(rollout.has_release(name) for name in names),
        "failed": failed[:DEVICES_SHOWN_MAX],
        "failed_count": len(failed),
        "waves": [_wave(rollout, wave) for wave in rollout.strategy.split(len(names))],
    }


def _wave(rollout: Rollout, wave: range) -> dict[str, int]:
    names = [rollout.devices[i] for i in wave]
    tried = sum(name in rollout.outcomes for name in names)
    took = sum(rollout.has_release(name) for name in names)
    return {"devices": len(names), "took": took, "failed": tried - took, "left": len(names) - tried}
