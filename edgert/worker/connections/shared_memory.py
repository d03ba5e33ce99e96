"""The shared memory of all clients of a worker: its limit, and the time when it is freed.

The kernel counts an area's pages for the client that writes them, and no figure of the worker contains them. So the
worker reserves the whole area from a budget before it creates the area, even if no page is ever written. A client can
keep an area's descriptor for ever, so the worker itself frees the pages when the connection ends. After a MOVED frame
the client may still copy its last answer, so the pages of an open connection stay for `UNREAD_S`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from edgert.config import ServingConfig
from edgert.protocol.sharing import SharedArea

SHARED_BYTES_MAX = 256 * 1024**2
MACHINE_SHARE = 1 / 8  # the budget as a share of the machine's memory
LIMIT_SHARE = 1 / 4  # the budget as a share of `worker_mb_max`, if it is set
USER_SHARE = 1 / 2  # one user's share of the budget
UNREAD_S = 10.0


def shared_bytes_max(serving: ServingConfig) -> int:
    """Return the budget of a worker."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit_bytes = serving.worker_mb_max * 1e6 * LIMIT_SHARE if serving.worker_mb_max else SHARED_BYTES_MAX
    return int(min(SHARED_BYTES_MAX, machine_bytes * MACHINE_SHARE, limit_bytes))


class SharedMemoryBudget:
    """Creates the areas of a worker. All areas together have at most `size_bytes_max`."""

    def __init__(self, size_bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size_bytes_max = size_bytes_max
        self._clock = clock
        self._lock = threading.Lock()
        self._by_user: Counter[int] = Counter()
        self._users: dict[SharedArea, int] = {}
        self._unread: deque[tuple[float, SharedArea]] = deque()  # the areas to free, each with its time

    @property
    def reserved_bytes(self) -> int:
        with self._lock:
            self._free_unread()
            return sum(self._by_user.values())

    def create_area(self, uid: int, half_bytes: int) -> tuple[SharedArea, int] | None:
        """Return an area for user `uid`, and its descriptor; None if budget or kernel refuse the area."""
        with self._lock:
            self._free_unread()
            size_bytes = SharedArea.bytes_for(half_bytes)
            if size_bytes > self._size_bytes_max - sum(self._by_user.values()):
                return None
            if size_bytes > self._size_bytes_max * USER_SHARE - self._by_user[uid]:
                return None
            area = SharedArea.create(half_bytes)
            if area is not None:
                self._users[area[0]] = uid
                self._by_user[uid] += size_bytes
            return area

    def release(self, area: SharedArea, *, unread: bool) -> None:
        """Free an area; if it is `unread`, only after `UNREAD_S`: its client may still copy an answer."""
        with self._lock:
            if unread:
                self._unread.append((self._clock() + UNREAD_S, area))
            else:
                self._free(area)

    def _free_unread(self) -> None:
        while self._unread and self._unread[0][0] <= self._clock():
            self._free(self._unread.popleft()[1])

    def _free(self, area: SharedArea) -> None:
        uid = self._users.pop(area)
        self._by_user[uid] -= area.size_bytes
        if not self._by_user[uid]:
            del self._by_user[uid]
        area.free_pages()
