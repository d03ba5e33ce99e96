"""A regular part is due again after its period; of several parts, the earliest due time is used."""

from __future__ import annotations

from edgert.daemon.timed import Periodic, soonest_s


def test_a_periodic_part_acts_at_once_and_then_after_every_period() -> None:
    now_s, done_at_s = 5.0, list[float]()
    every = Periodic(30.0, lambda: done_at_s.append(now_s), lambda: now_s)
    for now_s in (5.0, 6.0, 34.9, 35.0, 100.0):
        every.tick()
        assert every.due_s() > now_s, "else the loop would not rest"
    assert (done_at_s, every.due_s()) == ([5.0, 35.0, 100.0], 130.0)


def test_the_earliest_due_time_of_several_parts_is_used() -> None:
    parts = [Periodic(1.0, lambda: None, lambda at_s=at_s: at_s) for at_s in (3.0, 2.0)]  # type: ignore[misc]
    assert soonest_s(parts) == 2.0
    assert soonest_s([]) is None
