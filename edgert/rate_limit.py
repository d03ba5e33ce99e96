"""A limit on the bytes per second of a download or an upload."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """Limits a transfer to `bytes_per_s` (0: no limit). Unused time does not raise the rate later."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = 0.0

    def passed(self, size_bytes: int) -> None:
        """Wait until the transfer may continue after `size_bytes`."""
        if self._bytes_per_s:
            now_s = self._clock()
            self._free_at_s = max(now_s, self._free_at_s) + size_bytes / self._bytes_per_s
            self._sleep(self._free_at_s - now_s)
