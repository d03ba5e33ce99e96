"""Pauses grow with failures in a row. After a long attempt, earlier failures are forgotten."""

from __future__ import annotations

from edgert.backoff import Backoff, doubling


def test_the_pauses_double_up_to_a_limit() -> None:
    assert doubling(0.5, 30.0) == (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    assert doubling(5.0, 5.0) == (5.0,)


def test_each_failure_makes_the_pause_longer() -> None:
    backoff = Backoff((1.0, 2.0, 4.0))
    assert [backoff.failed() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    backoff.reset()
    assert (backoff.failures, backoff.failed()) == (0, 1.0)


def test_after_a_long_attempt_the_pauses_begin_anew() -> None:
    now = [0.0]
    backoff = Backoff((1.0, 2.0), stable_s=60.0, clock=lambda: now[0])
    backoff.started()
    backoff.failed()
    backoff.started()
    now[0] = 60.0
    assert backoff.failed() == 2.0
    backoff.started()
    now[0] = 121.0
    assert backoff.failed() == 1.0
