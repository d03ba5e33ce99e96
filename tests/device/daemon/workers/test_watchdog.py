"""The watchdog kills workers with too long runs, and replaces workers with too much memory."""

from __future__ import annotations

from typing import Any

from edgert.config import ServingConfig
from edgert.daemon.workers.watchdog import MEMORY_CHECK_S, RECYCLE_PAUSE_S, SILENT_S_MAX, Watchdog
from edgert.daemon.workers.worker_set import CHECK_S_MAX, WorkerSet
from edgert.versions.slots import Version
from edgert.worker_link import link
from tests.support.stand_ins.workers import LOAD_MESSAGE, FakeWorker

VERSION = Version(1, "d", good=True)


class World:
    """A worker that serves, its watchdog, and the number of requested replacements."""

    def __init__(self, **limits: Any) -> None:
        self.now_s, self.replaced = 0.0, 0
        self.worker = FakeWorker(VERSION, 0.0)
        self.workers = WorkerSet(lambda: self.now_s, lambda load_message, version, now_s: self.worker)
        self.watchdog = Watchdog(ServingConfig(**limits), self.workers, lambda: self.now_s, self._replace)
        self.workers.start(LOAD_MESSAGE, VERSION)
        self.workers.switch()
        self.watchdog.plan()

    def _replace(self, worker: Any) -> bool:
        self.replaced += 1
        return True

    def until(self, now_s: float) -> None:
        self.now_s = now_s
        self.watchdog.tick()


def test_checks_of_all_models_are_due_together() -> None:
    world = World(run_s_max=60.0)
    for world.now_s in (0.5, 17.0, 29.9):
        world.watchdog.plan()
        assert world.watchdog.due_s() == CHECK_S_MAX
    world.workers.stop_serving()
    assert world.watchdog.due_s() is None


def test_a_run_that_takes_too_long_is_ended_on_time() -> None:
    world = World(run_s_max=10.0)
    world.worker.run_page.since_s = 3.0
    world.now_s = 4.0
    world.watchdog.plan()
    due_s = world.watchdog.due_s()
    assert due_s is not None
    assert 10.0 <= due_s <= 13.001
    world.until(13.0)
    assert not world.worker.killed
    world.until(13.1)
    assert world.worker.killed
    assert "exceeded its limit of 10 s" in str(world.worker.failure)


def test_a_pause_of_daemon_and_worker_does_not_count_as_time_of_a_run() -> None:
    world = World(run_s_max=10.0)
    world.worker.run_page.since_s = 3.0
    world.until(500.0)
    world.until(509.9)
    assert not world.worker.killed
    due_s = world.watchdog.due_s()
    assert due_s is not None
    world.until(due_s)
    assert world.worker.killed


def test_a_worker_that_does_not_read_its_messages_is_asked_and_then_killed() -> None:
    world = World()
    world.until(30.0)
    assert world.worker.asked() == []  # an idle worker is not woken
    link.send(world.worker.link, {"op": "connection"})
    for now_s in range(60, int(90 + SILENT_S_MAX), 30):  # it is asked at 60
        world.until(now_s + 0.001)
    assert not world.worker.killed
    world.worker.run_page.since_s = 209.0
    world.until(90.0 + SILENT_S_MAX)
    assert not world.worker.killed  # an engine may hold Python's lock
    world.worker.run_page.since_s = None
    world.until(120.1 + SILENT_S_MAX)
    assert world.worker.killed
    assert "did not react for 120 s" in str(world.worker.failure)
    assert world.worker.asked() == ["connection", "stats"]


def test_a_worker_that_reads_its_messages_late_or_was_paused_with_the_daemon_is_not_killed() -> None:
    world = World()
    link.send(world.worker.link, {"op": "connection"})
    world.until(30.0)
    world.until(1000.0)  # the daemon was paused, too
    assert world.worker.asked() == ["connection", "stats"]
    world.worker.asked_s = None  # the supervisor does this at the worker's answer
    for now_s in range(1020, 1500, 30):
        world.until(now_s)
    assert not world.worker.killed
    assert world.worker.asked() == []


def test_a_worker_over_its_memory_limit_is_replaced_after_each_pause_and_killed_far_beyond_the_limit() -> None:
    world = World(run_s_max=0, worker_mb_max=100)
    assert world.watchdog.due_s() == MEMORY_CHECK_S
    world.until(MEMORY_CHECK_S)
    assert world.replaced == 0
    world.worker.now_mb = 101.0
    world.until(4.0)
    world.until(6.0)
    assert world.replaced == 1
    world.until(6.0 + RECYCLE_PAUSE_S)
    assert (world.replaced, world.worker.killed) == (2, False)
    world.worker.now_mb = 126.0
    world.until(8.0 + RECYCLE_PAUSE_S)
    assert (world.replaced, world.worker.killed) == (2, True)
    assert "126 MB" in str(world.worker.failure)
