"""The hours in which the follower may fetch, and the rate of downloads."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgert.config import FollowConfig
from edgert.errors import EdgeRTError
from edgert.rate_limit import RateLimit


class WindowClosed(EdgeRTError, code="channel.window_closed", exit_code=75, retryable=True):
    """The hours of `[follow]` do not allow a download now. It continues in the allowed hours."""


class Pace:
    """Counts fetched bytes and limits the hours and the rate of downloads.

    `local_minute` returns the minute of the local day.
    """

    def __init__(
        self,
        config: FollowConfig,
        clock: Callable[[], float] = time.monotonic,
        local_minute: Callable[[], int] = lambda: time.localtime().tm_hour * 60 + time.localtime().tm_min,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.fetched_bytes = 0
        self.wait = wait
        self._window = config.minutes
        self._local_minute = local_minute
        self._rate_limit = RateLimit(config.kbit_max * 1000 / 8, clock, wait)

    def check(self) -> None:
        """Raise WindowClosed unless the follower may fetch now."""
        if self._window is None:
            return
        (begin, end), now = self._window, self._local_minute()
        if not (begin <= now < end if begin < end else now >= begin or now < end):
            texts = (f"{minute // 60:02}:{minute % 60:02}" for minute in self._window)
            raise WindowClosed("the download waits for the window from {} to {}".format(*texts))

    def count_bytes(self, count: int) -> None:
        """Count `count` fetched bytes, and wait if the download is too fast. Raises WindowClosed."""
        self.fetched_bytes += count
        self.check()
        self._rate_limit.passed(count)
