"""The fleet's rows: repeated messages count once, missing messages show, and percentiles are merged."""

from __future__ import annotations

import random

import pytest

from edgert.telemetry import messages
from edgert.telemetry.sketch import RELATIVE_ERROR_MAX
from edgert_deploy.fleet import live_percentiles as live_percentiles_module
from edgert_deploy.fleet.live_percentiles import LivePercentiles, Row
from tests.support.fleet import Sender, feed


def row_of(state: LivePercentiles, device: str | None, now: float = 0.0) -> Row:
    (row,) = (row for row in state.rows(now) if row.device == device)
    return row


def test_a_device_s_windows_become_one_row() -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    state.apply(pi.topics.status, b"online", True, 0.0)
    feed(state, pi.window([1.0] * 98 + [50.0] * 2, errors=3))
    feed(state, pi.window([1.0] * 20))
    row = row_of(state, "pi-07")
    assert (row.site, row.model, row.state, row.model_version) == ("plant-a", "digits", "online", "r7")
    assert row.rate_per_s == pytest.approx(1.0)
    assert row.p50_ms == pytest.approx(1.0, rel=RELATIVE_ERROR_MAX)
    assert row.p99_ms == pytest.approx(50.0, rel=RELATIVE_ERROR_MAX)
    assert (row.answered, row.errors, row.missing, row.age_s) == (120, 3, 0, 0.0)


def test_a_repeated_message_counts_once() -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    sent = [message for _ in range(3) for message in pi.window([1.0] * 10)]
    feed(state, sent)
    feed(state, sent[2:])
    row = row_of(state, "pi-07")
    assert (row.answered, row.duplicates, row.missing) == (30, 4, 0)


def test_a_missing_message_is_counted_until_it_arrives() -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    windows = [pi.window([1.0] * 10) for _ in range(5)]
    feed(state, windows[0] + windows[4])
    assert row_of(state, "pi-07").missing == 3
    feed(state, windows[2])
    row = row_of(state, "pi-07")
    assert (row.missing, row.answered) == (2, 30)


def test_a_repeated_seq_after_a_reboot_is_another_message() -> None:
    state = LivePercentiles()
    feed(state, Sender("pi-07", boot="b1").window([1.0]))
    feed(state, Sender("pi-07", boot="b2").window([1.0]))
    row = row_of(state, "pi-07")
    assert (row.answered, row.duplicates, row.missing) == (2, 0, 0)


def test_fleet_percentiles_are_those_of_the_pooled_sample() -> None:
    state, dice = LivePercentiles(), random.Random(7)
    pooled: list[float] = []
    for number in range(20):
        scale = 100.0 if number == 0 else 1.0
        latencies = [scale * dice.uniform(0.5, 2) for _ in range(200)]
        pooled += latencies
        feed(state, Sender(f"pi-{number:02}").window(latencies))
    fleet = row_of(state, None)
    assert fleet.devices == 20
    assert fleet.rate_per_s == pytest.approx(4000 / 60)
    exact = sorted(pooled)[int(0.99 * 4000) - 1]
    assert fleet.p99_ms == pytest.approx(exact, rel=RELATIVE_ERROR_MAX + 0.002)  # and rounding to microseconds
    mean_of_p99 = sum(row.p99_ms or 0 for row in state.rows(0.0) if row.device) / 20
    assert abs(mean_of_p99 - exact) > exact / 2  # the mean of percentiles would differ


def test_each_model_is_summed_up_separately() -> None:
    state = LivePercentiles()
    feed(state, Sender("pi-07", "digits").window([1.0]))
    feed(state, Sender("pi-07", "faces").window([9.0]))
    assert [(row.model, row.answered) for row in state.fleet_rows(0.0)] == [("digits", 1), ("faces", 1)]


def test_only_the_last_windows_count() -> None:
    state, pi = LivePercentiles(horizon_s=100), Sender("pi-07")
    feed(state, pi.window([50.0]), now=0)
    feed(state, pi.window([1.0]), now=90)
    assert row_of(state, "pi-07", now=90).answered == 2
    assert row_of(state, "pi-07", now=110).answered == 1
    assert row_of(state, "pi-07", now=300).p99_ms is None


def test_a_backlog_that_arrives_at_once_is_not_taken_for_the_last_minutes() -> None:
    state, pi = LivePercentiles(horizon_s=120), Sender("pi-07")
    for _ in range(30):
        feed(state, pi.window([1.0]), now=5.0)
    assert row_of(state, "pi-07", now=5.0).answered == 3


def test_a_device_that_is_online_and_silent_becomes_stale() -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    state.apply(pi.topics.status, b"online", False, 0.0)
    feed(state, pi.window([1.0]), now=10.0)
    assert row_of(state, "pi-07", now=155.0).state == "online"
    assert row_of(state, "pi-07", now=161.0).state == "stale"
    state.apply(pi.topics.status, b"lost", False, 162.0)
    assert row_of(state, "pi-07", now=999.0).state == "lost"


def test_a_short_window_before_a_deployment_does_not_make_the_device_stale() -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    state.apply(pi.topics.status, b"online", False, 0.0)
    feed(state, pi.window([1.0]), now=10.0)
    feed(state, pi.window([1.0], window_s=5), now=15.0)
    feed(state, pi.window([1.0], window_s=11), now=26.0)
    assert row_of(state, "pi-07", now=90.0).state == "online"
    for now in (40.0, 50.0):  # the configured length of a window has changed
        feed(state, pi.window([1.0], window_s=10), now=now)
    assert row_of(state, "pi-07", now=76.0).state == "stale"


def test_a_retained_message_is_not_a_sign_of_life() -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    state.apply(pi.topics.status, b"online", True, 0.0)
    state.apply(pi.topics.info, messages.dump({"v": 1, "edgert": "0.1.0"}), True, 0.0)
    row = row_of(state, "pi-07", now=100.0)
    assert (row.age_s, row.state) == (None, "online")
    assert row.model_version == "", "edgert's own version is no model's"
    assert row_of(state, "pi-07", now=200.0).state == "stale"


def test_messages_outside_the_contract_are_counted_and_otherwise_ignored() -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    feed(state, pi.window([1.0]))
    for topic, payload in [
        ("edgert/v1/plant-a/pi-07/status", b"perhaps"),
        ("edgert/v1/plant-a/pi-07/m/digits/hist", b"{}"),
        ("edgert/v1/plant-a/pi-07/m/digits/hist", b"\xff\x00"),
        ("something/else", b""),
    ]:
        state.apply(topic, payload, False, 0.0)
    assert state.refused == 4
    assert row_of(state, "pi-07").answered == 1


def test_the_number_of_devices_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_percentiles_module, "DEVICES_MAX", 3)
    state = LivePercentiles()
    for number in range(5):
        feed(state, Sender(f"pi-{number}").window([1.0]))
    assert len(state.devices) == 3
    assert "one site with --site" in state.last_refusal
