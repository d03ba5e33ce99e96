"""The memory of worker processes: what they use, what each version used before, which models to unload.

The budget counts proportional set sizes (PSS), so that memory that several workers share counts once. A version's size
is measured while it serves, and stored in the device's state by the version's digest.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import replace_file

WORKER_BASE_MB = 40.0  # interpreter, NumPy and EdgeRT's code, without an engine
LEARNED_SHARE = 0.05  # smaller changes are not written
IDLE_S_MIN = 1.0  # a model that was used within this time is not unloaded


def process_mb(pid: int) -> float | None:
    """Return the process's PSS in MB (10^6 bytes), or its resident size on older kernels; None once it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    except (OSError, ValueError, IndexError):
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
    except (OSError, ValueError, IndexError):
        return None


class LearnedSizes:
    """The size of each version's worker in MB, stored in `folder`, the state's `learned/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, float] = {}

    def of(self, digest: str) -> float | None:
        """Return the size of a worker with the version `digest`, or None if it never served here."""
        if digest not in self._known:
            try:
                self._known[digest] = float(json.loads(self._path(digest).read_bytes())["worker_mb"])
            except (OSError, ValueError, KeyError, TypeError):
                return None  # not measured yet, or damaged
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
            pass  # a full disk costs the memory of it, not the serving

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest[:32]}.size.json"


def estimated_mb(folder: Path) -> float:
    """Return what a version that never served here may need: its files once, and a worker."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # an install may remove files meanwhile
                size += os.lstat(os.path.join(parent, name)).st_size
    return WORKER_BASE_MB + size / 1e6


@dataclass(frozen=True)
class Claim:
    """One worker's share of the budget. A `leaving` worker frees it soon; a `fixed` one is not unloaded."""

    model: str
    mb: float
    used_at_s: float = 0.0
    leaving: bool = False
    fixed: bool = False  # pinned, on trial or being replaced


@dataclass(frozen=True)
class Room:
    """Whether there is room now; if not, the models to unload for it (none: wait)."""

    now: bool
    unload: tuple[str, ...] = ()


def make_room(need_mb: float, limit_mb: float, claims: Sequence[Claim], now_s: float) -> Room:
    """Decide how `need_mb` fits under `limit_mb` beside `claims`.

    The least recently used models are unloaded first, as few as possible, and none if that would not suffice.
    """
    staying = [claim for claim in claims if not claim.leaving]
    if need_mb <= limit_mb - sum(claim.mb for claim in claims):
        return Room(now=True)
    missing = need_mb - (limit_mb - sum(claim.mb for claim in staying))
    going: list[str] = []
    for claim in sorted(staying, key=lambda c: c.used_at_s):
        if missing <= 0:
            break
        if not claim.fixed and now_s - claim.used_at_s >= IDLE_S_MIN:
            going.append(claim.model)
            missing -= claim.mb
    return Room(now=False, unload=tuple(going) if missing <= 0 else ())
