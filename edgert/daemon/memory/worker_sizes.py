"""The memory of each version's worker: measured while it serves, stored by the version's digest."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from edgert.durable import replace_file
from edgert.state_dir import LEARNED_NAME_CHARS

# The memory of a worker with its engine's code, but without its model.
PROGRAM_MB = 40.0  # for a worker that is a separate program
FORK_MB = 12.0  # for a fork, which shares most of this memory with the fork server (decision 24)
LEARNED_SHARE = 0.05  # a size is stored again if it changed by more than this share


class LearnedSizes:
    """The size of each version's worker in MB, stored in `folder`, the state's `learned/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, float] = {}

    def of(self, digest: str) -> float | None:
        """Return the size of a worker with the version `digest`; None if no size is stored."""
        if digest not in self._known:
            try:
                self._known[digest] = float(json.loads(self._path(digest).read_bytes())["worker_mb"])
            except (OSError, ValueError, KeyError, TypeError):
                return None  # the file is missing or damaged
        return self._known[digest]

    def learn(self, digest: str, mb: float) -> None:
        """Store the size of a version's worker."""
        before = self.of(digest)
        if before is not None and abs(mb - before) <= LEARNED_SHARE * before:
            return
        self._known[digest] = mb
        path = self._path(digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"worker_mb": round(mb, 1)}).encode(), durable=False)
        except OSError:
            pass  # the disk is full: the size is not stored, but the model serves

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest[:LEARNED_NAME_CHARS]}.size.json"


def estimated_mb(folder: Path, forked: bool) -> float:
    """Return an estimate in MB for a version that never served here: its files in `folder`, and a worker."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # an install may remove files at the same time
                size += os.lstat(os.path.join(parent, name)).st_size
    return (FORK_MB if forked else PROGRAM_MB) + size / 1e6
