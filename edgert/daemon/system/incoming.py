"""Removes what hosts left in `STATE/incoming` when they died or lost the link.

An interrupted transfer can be resumed for PARTIAL_S_MAX after its last byte; everything else there belongs to a command
of a few minutes. Ages come from the wall clock, which may jump by years on a device without a battery. So nothing is
removed while the clock is not synchronized, nor before the daemon has seen it unchanged for WATCHED_S_MIN.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from edgert import machine
from edgert.log import log

PARTIAL_S_MAX = 7 * 86400.0  # how long an interrupted transfer is kept after its last byte
LEFT_S_MAX = 86400.0  # how long complete files and folders are kept: those of an install, of a bench
WATCHED_S_MIN = 6 * 3600.0
CHECK_S = 3600.0


@dataclass
class IncomingFolder:
    """Cleans `folder` and logs what it removed. `clock` is monotonic seconds."""

    folder: Path
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    clock_synced: Callable[[], bool | None] = machine.clock_synced
    _seen: dict[tuple[str, int, float], float] = field(default_factory=dict)  # name, size, mtime -> since when

    def clean(self) -> None:
        """Remove what is old enough; call it every CHECK_S."""
        now_s = self.clock()
        wall_s, may_remove, seen = self.wall_clock(), self.clock_synced() is not False, {}
        for path in self._entries():
            try:
                stat = path.lstat()
            except OSError:  # its command has just removed it
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
