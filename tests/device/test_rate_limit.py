"""The limit on the bytes per second of a transfer."""

from __future__ import annotations

import pytest

from edgert.rate_limit import RateLimit


def test_the_limit_holds_and_idle_time_does_not_allow_a_burst() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    rate_limit = RateLimit(1000.0, clock=lambda: now[0], sleep=sleep)
    for _ in range(5):
        rate_limit.passed(200)
    assert now[0] == pytest.approx(101.0)
    now[0] += 60.0
    rate_limit.passed(1000)
    assert now[0] == pytest.approx(162.0)
