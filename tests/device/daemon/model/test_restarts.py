"""The crashes of one version make the pause before the next start longer, and are forgotten later."""

from __future__ import annotations

import pytest

from edgert.backoff import STABLE_S
from edgert.daemon.model.restarts import CRASHES_MAX, QUARANTINE_PAUSES_S, RESTART_PAUSES_S, Restarts


class World:
    """A clock, and the number of restarts."""

    def __init__(self) -> None:
        self.now_s, self.starts = 100.0, 0
        self.restarts = Restarts(lambda: self.now_s, self._start)

    def _start(self) -> None:
        self.starts += 1

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.restarts.tick()


def test_the_pauses_grow_to_a_limit() -> None:
    restarts, pauses = World().restarts, []
    for count in range(1, 10):
        restarts.note_crash("d")
        pauses.append(restarts.plan())
        assert restarts.too_many is (count >= CRASHES_MAX)
    assert tuple(pauses[:7]) == RESTART_PAUSES_S + QUARANTINE_PAUSES_S
    assert pauses[7:] == [QUARANTINE_PAUSES_S[-1]] * 2


def test_the_crashes_are_forgotten_after_a_stable_worker_and_for_another_version() -> None:
    restarts = World().restarts
    restarts.note_crash("d")
    restarts.note_crash("d", served_s=STABLE_S)
    restarts.note_start("d")
    assert restarts.crashes == 2
    restarts.note_crash("d", served_s=STABLE_S + 1)
    assert restarts.crashes == 1
    restarts.note_start("e")
    assert restarts.crashes == 0


def test_the_time_of_workers_that_ended_as_planned_counts_until_the_next_crash() -> None:
    """A model that other models displace again and again has only short-lived workers."""
    restarts = World().restarts
    for _ in range(2):
        restarts.note_crash("d")
        restarts.note_planned_end(STABLE_S / 2)
    assert restarts.crashes == 2
    restarts.note_planned_end(STABLE_S / 2)
    restarts.note_crash("d", served_s=1.0)
    assert restarts.crashes == 1
    restarts.note_crash("d", served_s=1.0)
    assert restarts.crashes == 2


def test_a_worker_is_started_once_after_the_pause_unless_the_restart_is_cancelled() -> None:
    world = World()
    world.restarts.note_crash("d")
    pause_s = world.restarts.plan()
    assert world.restarts.due_s() == world.now_s + pause_s
    assert world.restarts.in_s() == pytest.approx(pause_s)
    for waited_s, starts in ((pause_s / 2, 0), (pause_s, 1), (pause_s, 1)):
        world.wait(waited_s)
        assert world.starts == starts
    world.restarts.plan()
    world.restarts.cancel()
    world.wait(pause_s)
    assert (world.starts, world.restarts.in_s(), world.restarts.due_s()) == (1, None, None)
