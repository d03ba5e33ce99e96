"""The watchdog ends runs that take too long and workers that outgrow their memory, on a clock that the test moves."""

from __future__ import annotations

import pytest

from edgert.config import ServingConfig
from edgert.daemon.workers.watchdog import CHECK_S_MAX, MEMORY_CHECK_S, RECYCLE_PAUSE_S, Watchdog
from edgert.versions.slots import Version
from tests.support.workers import FakeWorker


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(Version(1, "d", good=True), 0.0)


def test_checks_of_all_models_are_due_together(worker: FakeWorker) -> None:
    watchdog = Watchdog(ServingConfig(run_s_max=60.0))
    for now_s in (0.5, 17.0, 29.9):
        watchdog.plan(worker, now_s)
        assert watchdog.due_s == CHECK_S_MAX
    watchdog.plan(None, 1.0)
    assert watchdog.due_s is None


def test_a_run_that_takes_too_long_is_ended_on_time(worker: FakeWorker) -> None:
    watchdog = Watchdog(ServingConfig(run_s_max=10.0))
    worker.run_page.since_s = 3.0
    watchdog.plan(worker, 4.0)
    assert watchdog.due_s is not None
    assert 10.0 <= watchdog.due_s <= 13.001
    assert not watchdog.check(worker, 13.0)
    assert not worker.killed
    watchdog.check(worker, 13.1)
    assert worker.killed
    assert "longer than 10 s" in str(worker.failure)


def test_memory_over_the_limit_is_replaced_once_a_pause_and_killed_far_beyond(worker: FakeWorker) -> None:
    watchdog = Watchdog(ServingConfig(run_s_max=0, worker_mb_max=100))
    watchdog.plan(worker, 0.0)
    assert watchdog.due_s == MEMORY_CHECK_S
    assert not watchdog.check(worker, 1.0)
    worker.now_mb = 101.0
    assert watchdog.check(worker, 2.0)
    watchdog.recycled(2.0)
    assert not watchdog.check(worker, 3.0)
    assert watchdog.check(worker, 3.0 + RECYCLE_PAUSE_S)
    worker.now_mb = 126.0
    assert not watchdog.check(worker, 4.0)
    assert worker.killed
    assert "126 MB" in str(worker.failure)
