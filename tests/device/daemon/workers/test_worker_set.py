"""Workers are started, switched, retired and killed in time."""

from __future__ import annotations

import pytest

from edgert.daemon.workers.worker_process import LOAD_S_MAX, PROGRESS_S_MAX, STOP_S_MAX
from edgert.daemon.workers.worker_set import CHECK_S_MAX, STUCK_S, WorkerSet
from edgert.versions.slots import Version
from tests.support.stand_ins.workers import LOAD_MESSAGE, FakeWorker

VERSION = Version(1, "d", good=True)


class World:
    """A set of fake workers and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.set = WorkerSet(lambda: self.now_s, lambda load_message, version, now_s: FakeWorker(version, now_s))

    def start(self) -> FakeWorker:
        worker = self.set.start(LOAD_MESSAGE, VERSION)
        assert isinstance(worker, FakeWorker)
        return worker

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while (due_s := self.set.due_s()) is not None and due_s < until_s:
            self.pause(due_s - self.now_s + 0.001)
        self.pause(until_s - self.now_s)

    def pause(self, seconds: float) -> None:
        """Let the time pass, and tick only at its end, as after `docker pause`."""
        self.now_s += seconds
        self.set.tick()


@pytest.fixture
def world() -> World:
    return World()


def test_a_switch_retires_the_worker_that_served(world: World) -> None:
    old = world.start()
    world.set.switch()
    new = world.start()
    assert (world.set.serving, world.set.loading) == (old, new)
    world.set.switch()
    assert (world.set.serving, world.set.loading, list(world.set)) == (new, None, [new, old])
    assert (old.ending, new.ending, old.asked()) == (True, False, ["stop"])
    assert world.set.due_s() == world.now_s + STOP_S_MAX
    world.wait(STOP_S_MAX + 0.1)
    assert old.killed
    assert not world.set.remove(old)
    assert list(world.set) == [new]


def test_a_load_is_killed_after_a_time_limit_that_progress_extends(world: World) -> None:
    worker = world.start()
    assert world.set.due_s() == world.now_s + CHECK_S_MAX
    world.wait(LOAD_S_MAX)
    worker.handle_message({"op": "progress", "line": "builds a plan"}, world.now_s)
    world.wait(PROGRESS_S_MAX)
    assert (worker.killed, worker.progress) == (False, "builds a plan")
    world.wait(0.1)
    assert worker.killed
    assert "did not load within 1080 s" in str(worker.failure)
    assert world.set.remove(worker), "its end was not expected"


def test_a_pause_of_daemon_and_worker_does_not_count_as_time_of_a_load_or_an_end(world: World) -> None:
    old = world.start()
    world.set.switch()
    worker = world.start()
    world.set.stop_serving()
    world.pause(1000.0)
    world.wait(STOP_S_MAX - 1)
    assert (old.killed, worker.killed) == (False, False)
    world.wait(10.0)
    assert (old.killed, worker.killed) == (True, False)
    world.wait(LOAD_S_MAX)
    assert worker.killed


def test_the_end_of_an_abandoned_load_is_expected(world: World) -> None:
    worker = world.start()
    world.set.kill_loading()
    assert (worker.killed, world.set.loading, world.set.remove(worker)) == (True, None, False)


def test_a_worker_that_outlives_its_kill_counts_as_stuck(world: World) -> None:
    worker = world.start()
    worker.kill(world.now_s)
    assert not world.set.stuck
    world.wait(STUCK_S + 0.1)
    assert world.set.stuck


def test_a_run_in_progress_makes_the_set_busy(world: World) -> None:
    worker = world.start()
    assert not world.set.busy
    worker.run_page.since_s = 99.0
    assert world.set.busy
