"""The hours and the rate of the follower's downloads."""

from __future__ import annotations

import pytest

from edgert.config import FollowConfig
from edgert.follow.pace import Pace, WindowClosed


def minute(text: str) -> int:
    return int(text[:2]) * 60 + int(text[3:])


@pytest.mark.parametrize(
    ("window", "now", "may"),
    [
        ("", "12:00", True),
        ("02:00-05:30", "01:59", False),
        ("02:00-05:30", "02:00", True),
        ("02:00-05:30", "05:29", True),
        ("02:00-05:30", "05:30", False),
        ("22:00-05:00", "23:59", True),
        ("22:00-05:00", "00:00", True),
        ("22:00-05:00", "12:00", False),
    ],
)
def test_a_window_of_time_may_include_midnight(window: str, now: str, may: bool) -> None:
    pace = Pace(FollowConfig(window=window), local_minute=lambda: minute(now))
    if may:
        pace.check()
        pace.count_bytes(1)
    else:
        with pytest.raises(WindowClosed, match="waits for the window from"):
            pace.check()


def test_the_rate_is_kept_over_many_pieces() -> None:
    now_s, waits = 0.0, list[float]()

    def wait(pause_s: float) -> None:
        nonlocal now_s
        waits.append(pause_s)
        now_s += pause_s

    pace = Pace(FollowConfig(kbit_max=80.0), clock=lambda: now_s, wait=wait)
    for _ in range(10):
        pace.count_bytes(1000)
    assert now_s == pytest.approx(1.0)  # 10,000 bytes at 10,000 bytes a second
    now_s += 100.0  # bytes that were not used in a pause do not add up
    pace.count_bytes(1000)
    assert waits[-1] == pytest.approx(0.1)
