"""An exporter counts each report once, however often the report arrives."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from edgert.telemetry import messages
from edgert.telemetry.messages import Topics
from edgert.telemetry.sketch import Sketch
from tests.support.fleet import NOW_MS, Pi, Sent, an_exporter, counted, feed


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_each_report_counts_once_however_often_it_arrives(seed: int) -> None:
    dice = random.Random(seed)
    exporter, devices = an_exporter(), [Pi(f"pi-{n}") for n in range(3)]
    expected, reports = Sketch(), Sent()
    for pi in devices:
        for minute in range(6):
            reports += pi.window(NOW_MS + minute, [dice.uniform(1, 9)] * dice.randrange(5), errors=1, uptime_s=60 + 60 * minute)  # fmt: skip
            expected.merge(pi.sketches[-1][1])
    events = [
        (Topics("plant-a", "pi-0").event, messages.dump(messages.envelope(ts_ms=NOW_MS, boot="b1", seq=n) | {"event": "degraded", "model": f"m{n % 2}"}))
        for n in range(1, 5)
    ]  # fmt: skip
    for at, message in enumerate(reports + events):
        exporter.apply(*message, False, 0.0)
        if dice.random() < 0.3:
            exporter.apply(*dice.choice((reports + events)[max(0, at - 5) : at + 1]), False, 0.0)
    total, (requests, errors, _, _) = counted([exporter])
    assert total == expected
    assert (requests, errors) == (sum(pi.requests for pi in devices), sum(pi.errors for pi in devices))
    assert sum(exporter.events.values()) == 4
    assert (exporter.counting.missing, exporter.refused) == (0, 0)


def test_an_invalid_report_is_counted_and_otherwise_ignored() -> None:
    exporter = an_exporter()
    exporter.apply("edgert/v1/plant-a/pi-1/m/digits/hist", b"{}", False, 0.0)
    assert (exporter.refused, exporter.groups) == (1, {})


def test_a_repeated_report_counts_once_and_counters_survive_a_restart_of_the_worker() -> None:
    exporter, pi = an_exporter(by="device,model"), Pi("pi-1")
    pi.requests = 1000  # the worker ran before the exporter started
    sent = pi.window(NOW_MS, [1.0] * 5) + pi.window(NOW_MS, [1.0] * 7)
    pi.requests = 0
    sent += pi.window(NOW_MS, [1.0] * 2, uptime_s=20)
    feed(exporter, sent + sent)
    total, (requests, *_) = counted([exporter])
    assert (total.count, requests, exporter.counting.duplicates) == (14, 7 + 2, 6)


def test_counters_continue_although_a_device_loses_its_spool_and_each_loss_is_counted() -> None:
    exporter, pi, answered = an_exporter(), Pi("pi-1"), 0
    for n, first in enumerate((0, 2**50, 2**40, 2**45)):
        pi.seq = first
        for _ in range(2):
            feed(exporter, pi.window(NOW_MS, [1.0] * 10, uptime_s=60 if n == 0 else 6000))
        answered += 20
        pi.window(NOW_MS, [1.0] * 10)  # lost with the spool, but included in the next counters
    total, (requests, *_) = counted([exporter])
    assert (total.count, requests, exporter.counting.missing) == (answered, 4 * 30 - 10, 3)
