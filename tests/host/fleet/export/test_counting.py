"""A report is added once, a late report adds nothing, and the number of remembered streams is limited."""

from __future__ import annotations

import pytest

from edgert.telemetry.messages import MetricsMessage, parse_topic
from edgert_deploy.fleet.export import counting as counting_module
from edgert_deploy.fleet.export.counting import Counting
from edgert_deploy.fleet.reports import parse_report
from tests.support.fleet import NOW_MS, Pi, Sent


def increases(counting: Counting, sent: Sent) -> list[int]:
    """Return by how much each metrics report increases the number of requests."""
    grown = []
    for topic, payload in sent:
        report = parse_report(parse_topic(topic), payload)
        if isinstance(report, MetricsMessage):
            grown.append(counting.increase(parse_topic(topic), report)[0])
    return grown


def test_a_late_report_does_not_increase_a_counter_again() -> None:
    pi, counting = Pi("pi-1"), Counting()
    first, late, last = (pi.window(NOW_MS, [1.0] * count, uptime_s=60) for count in (2, 3, 4))
    assert increases(counting, first + last + late) == [2, 7, 0]


def test_totals_from_before_the_exporter_listened_are_not_counted() -> None:
    pi = Pi("pi-1")
    pi.requests = 1000
    assert increases(Counting(), pi.window(NOW_MS, [1.0]) + pi.window(NOW_MS, [1.0] * 5)) == [0, 5]


def test_missing_histograms_are_counted_for_their_device_alone() -> None:
    counting, devices = Counting(), (Pi("pi-1"), Pi("pi-2"))
    for pi in devices:
        windows = [pi.window(NOW_MS, [1.0]) for _ in range(4)]
        for topic, payload in windows[0] + (windows[1] + windows[2] if pi is devices[1] else []) + windows[3]:
            counting.is_new(parse_topic(topic), parse_report(parse_topic(topic), payload))
    assert counting.missing_by_device() == {("plant-a", "pi-1"): 2}
    assert (counting.missing, counting.duplicates) == (2, 0)


def test_beyond_the_limit_the_stream_that_is_silent_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_module, "STREAMS_MAX", 2)
    counting, reports = Counting(), {name: Pi(name).window(NOW_MS, [1.0])[0] for name in ("a", "b", "c")}

    def is_new(name: str) -> bool:
        topic, payload = reports[name]
        return counting.is_new(parse_topic(topic), parse_report(parse_topic(topic), payload))

    assert [is_new(name) for name in ("a", "b", "a", "c")] == [True, True, False, True]
    assert counting.streams == 2
    assert [is_new("a"), is_new("b")] == [False, True]
