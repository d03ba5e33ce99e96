"""A trial watch requests figures, judges them, and fails a worker that reports no figures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from edgert.checks.trial_status import TrialPhase
from edgert.daemon.model.trial_watch import FILL_GRACE_S, SILENT_S_MAX, TrialWatch, event_fields
from edgert.versions.slots import Version
from edgert.versions.trial_limits import BROKEN_CHECKS_MAX, FILL_S_MAX, REQUESTS_MIN, Readings, TrialLimits
from edgert.worker_link import link
from tests.support.stand_ins.workers import FakeWorker
from tests.support.stand_ins.workers import figures_message as figures


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(Version(2, "d", good=False), 0.0)


def a_watch(worker: FakeWorker, thermometer: Callable[[], float | None] = lambda: 50.0, **bounds: float) -> TrialWatch:
    """Return a watch of 60 s that starts at 0 s and requests figures each second."""
    return TrialWatch(TrialLimits(bounds, 60.0), worker, 0.0, thermometer)


def test_a_limit_breaks_the_trial_when_it_is_broken_several_times_in_a_row(worker: FakeWorker) -> None:
    temperatures = iter([90.0, 70.0, *[90.0] * BROKEN_CHECKS_MAX])
    watch = a_watch(worker, lambda: next(temperatures), temp_c=80.0)
    for second in range(1, 3 + BROKEN_CHECKS_MAX):
        assert watch.phase is TrialPhase.WATCHING
        watch.tick(float(second))
        assert worker.asked() == ["figures"]
        watch.handle_message(figures(), float(second))
    assert watch.phase is TrialPhase.BROKEN
    assert watch.finding is not None
    assert watch.finding.message.startswith("temp_c is 90 °C, above its limit of 80 °C")
    assert (watch.over, watch.due_s) == (True, None)


def test_a_worker_that_reports_no_figures_fails(worker: FakeWorker) -> None:
    watch = a_watch(worker)
    for second in range(1, int(SILENT_S_MAX) + 3):
        watch.tick(float(second))
    assert watch.finding is not None
    assert "reported no figures" in watch.finding.message


def test_a_pause_of_the_daemon_is_not_a_silence_of_the_worker(worker: FakeWorker) -> None:
    watch = a_watch(worker)
    watch.tick(1.0)
    watch.handle_message(figures(), 1.0)
    watch.tick(2 * SILENT_S_MAX)  # a slow disk or a paused container
    assert watch.phase is TrialPhase.WATCHING
    assert worker.asked() == ["figures"] * 2
    watch.handle_message(figures(), 2 * SILENT_S_MAX)
    assert watch.phase is TrialPhase.WATCHING


def test_a_watch_is_held_if_its_limits_hold_at_the_end(worker: FakeWorker) -> None:
    watch = a_watch(worker, p99_ms=8.0)
    watch.handle_message(figures(requests=REQUESTS_MIN, p99_ms=9.0), 30.0)
    assert watch.phase is TrialPhase.WATCHING
    watch.handle_message(figures(requests=2 * REQUESTS_MIN, p99_ms=7.0), 60.0)
    assert (watch.phase, watch.finding, watch.watched_s(60.0)) == (TrialPhase.HELD, None, 60.0)
    status = watch.status(59.0)
    assert (status.release, status.phase, status.left_s, status.readings.requests) == (2, "held", 1.0, 200)
    fields = event_fields(watch.readings)
    assert (fields["requests"], fields["p99_ms"], fields["error_rate"]) == (200, 7.0, 0.0)


def test_a_limit_on_agreement_that_held_on_few_answers_is_doubted_at_the_end(worker: FakeWorker) -> None:
    watch = a_watch(worker, agreement=0.99)
    watch.handle_message(figures(requests=REQUESTS_MIN, compared=25, agreed=25), 30.0)
    assert watch.status(30.0).doubt == ""
    watch.handle_message(figures(requests=REQUESTS_MIN, compared=25, agreed=25), 60.0)
    assert (watch.phase, watch.finding) == (TrialPhase.HELD, None)
    assert watch.status(60.0).doubt.startswith("only 25 answers were compared")


def test_without_enough_requests_the_worker_sends_itself_golden_samples(worker: FakeWorker) -> None:
    watch = a_watch(worker, p99_ms=8.0)
    watch.count_golden(3)
    watch.handle_message(figures(requests=10), 60.0)
    assert (watch.phase, worker.asked()) == (TrialPhase.FILLING, ["send_golden"])
    assert watch.due_s is not None
    assert watch.due_s > FILL_S_MAX + FILL_GRACE_S
    watch.handle_message(figures(requests=50), 61.0)
    assert watch.phase is TrialPhase.FILLING
    watch.handle_message({"op": "golden_sent", "count": 90}, 70.0)
    watch.handle_message(figures(requests=100, p99_ms=1.0), 70.1)
    assert (watch.phase, watch.readings.golden) == (TrialPhase.HELD, 93)


def test_a_worker_with_a_full_queue_is_asked_for_golden_samples_again(worker: FakeWorker) -> None:
    watch = a_watch(worker, p99_ms=8.0)
    with suppress(BlockingIOError):
        while True:
            link.send(worker.link, {"op": "figures"})
    watch.handle_message(figures(requests=10), 60.0)
    worker.asked()
    assert watch.phase is TrialPhase.WATCHING
    watch.tick(61.0)
    watch.handle_message(figures(requests=10), 61.0)
    assert (watch.phase, worker.asked()) == (TrialPhase.FILLING, ["figures", "send_golden"])


def test_an_event_has_no_fields_for_unknown_readings() -> None:
    assert event_fields(Readings(memory_mb=5.0)) == {"requests": 0, "golden": 0, "rss_mb": 5.0}
