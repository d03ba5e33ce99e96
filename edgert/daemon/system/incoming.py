"""Removes files that hosts left in `STATE/incoming`, because the host stopped or lost the connection.

A host can resume an interrupted transfer for PARTIAL_S_MAX after its last byte. Other files in this folder belong to
commands that take a few minutes. The age of a file depends on the wall clock, which may jump by years on a device
without a battery. So no file is removed while the wall clock is not synchronized. A file must also have stayed
unchanged for WATCHED_S_MIN on the monotonic clock.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgert import machine
from edgert.log import log

PARTIAL_S_MAX = 7 * 86400.0  # the age at which an interrupted transfer is removed
LEFT_S_MAX = 86400.0  # the age at which the files and folders of an install or a bench are removed
WATCHED_S_MIN = 6 * 3600.0
CHECK_S = 3600.0


@dataclass
class IncomingFolder:
    """Cleans `folder` and logs each removal. `clock` is monotonic seconds."""

    folder: Path
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    clock_synced: Callable[[], bool | None] = machine.clock_synced
    _seen: dict[tuple[str, int, float], float] = field(default_factory=dict)  # name, size, mtime -> first seen

    def clean(self) -> None:
        """Remove the files that are old enough. Call this every CHECK_S."""
        now_s = self.clock()
        wall_s, may_remove, seen = self.wall_clock(), self.clock_synced() is not False, {}
        for path in self._entries():
            try:
                stat = path.lstat()
            except OSError:  # a command has just removed the file
                continue
            known = (path.name, stat.st_size, stat.st_mtime)
            seen[known] = self._seen.get(known, now_s)
            limit_s = PARTIAL_S_MAX if path.name.endswith(".part") else LEFT_S_MAX
            watched = now_s - seen[known] >= WATCHED_S_MIN
            if may_remove and watched and wall_s - stat.st_mtime > limit_s:
                self._remove(path)
        self._seen = seen

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir())
        except OSError:
            return []

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            try:
                path.unlink()
            except OSError:  # the next check tries again
                return
        log(f"removed {path}, which a host left behind")
