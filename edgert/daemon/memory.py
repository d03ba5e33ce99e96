"""What worker processes take of the memory, what each version took before, and who must go to make room.

The budget counts proportional set sizes (PSS): what several workers share is counted once. A version's size is
learned from the process that served it and kept in the device's state, by the digest that names all its content.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert.durable import replace_file

WORKER_BASE_MB = 40.0  # interpreter, NumPy and the daemon's own code, before any engine
LEARNED_SHARE = 0.05  # smaller changes than this are not written again
IDLE_S_MIN = 1.0  # a model asked within that time is not unloaded for another's sake


def process_mb(pid: int) -> float | None:
    """The process's PSS in MB (10^6 bytes), its resident size where the kernel does not tell; None once it is gone."""
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
    """How large each version's worker was, in MB; `folder` is the state's `learned/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, float] = {}

    def of(self, digest: str) -> float | None:
        """What a worker with the version `digest` took, or None where none ever served here."""
        if digest not in self._known:
            try:
                self._known[digest] = float(json.loads(self._path(digest).read_bytes())["worker_mb"])
            except (OSError, ValueError, KeyError, TypeError):
                return None  # never learned, or damaged: it is learned again
        return self._known[digest]

    def learn(self, digest: str, mb: float) -> None:
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
    """What a version never served here may take: its files, once, and the worker around them."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # an install puts files there, and takes them away
                size += os.lstat(os.path.join(parent, name)).st_size
    return WORKER_BASE_MB + size / 1e6


@dataclass(frozen=True)
class Claim:
    """One worker's share of the budget. `leaving` ones give theirs back by themselves; `fixed` ones never."""

    model: str
    mb: float
    used_at_s: float = 0.0
    leaving: bool = False
    fixed: bool = False  # pinned, on trial or being replaced


@dataclass(frozen=True)
class Room:
    """Whether there is room now; if not, which models to unload for it (none: wait)."""

    now: bool
    unload: tuple[str, ...] = ()


def make_room(need_mb: float, limit_mb: float, claims: Sequence[Claim], now_s: float) -> Room:
    """Decide how `need_mb` fits under `limit_mb` beside `claims`: pure.

    The least recently used models go first, and only as many as must; nobody goes where it would not suffice.
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
