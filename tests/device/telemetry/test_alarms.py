"""Several windows raise or clear an alarm; one window never does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgert.config import AlarmConfig, parse_config
from edgert.errors import ConfigInvalid
from edgert.telemetry.alarms import Alarms, Change, Readings
from edgert.telemetry.messages import Topics
from edgert.telemetry.reporter import Reporter, ReporterSettings
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spans import Outcome, RequestSpan
from edgert.telemetry.spool import Spool


def changes(values: list[float | None], limit: float = 100.0) -> list[Change | None]:
    alarms = Alarms({"temp_c": limit})
    return [next(iter(alarms.judge({"temp_c": value})), None) for value in values]


def test_two_windows_above_the_limit_raise_an_alarm_and_three_well_below_it_clear_the_alarm() -> None:
    said = changes([101, 99, 101, 102, 95, 101, 89, 88, 87, 50])
    assert said == [
        None,
        None,
        None,
        Change("temp_c", True, 102, 100),
        *[None] * 4,
        Change("temp_c", False, 87, 100),
        None,
    ]


def test_a_window_without_a_reading_is_ignored() -> None:
    assert changes([101, None, 102])[-1] == Change("temp_c", True, 102, 100)


@pytest.mark.parametrize(
    ("p99_ms", "p95_ms", "limit"), [(0.0, 10.0, 20.0), (5.0, 10.0, 5.0)], ids=["twice the target", "as set"]
)
def test_the_limit_of_the_p99_follows_the_models_target(p99_ms: float, p95_ms: float, limit: float) -> None:
    alarms = Alarms.of(AlarmConfig(p99_ms=p99_ms), p95_ms, 0)
    alarms.judge({"p99_ms": limit + 1})
    assert alarms.judge({"p99_ms": limit + 1}) == [Change("p99_ms", True, limit + 1, limit)]


def test_without_a_target_no_latency_is_an_alarm() -> None:
    alarms = Alarms.of(AlarmConfig(), 0, 0)
    assert not alarms.judge({"p99_ms": 1e9})
    assert not alarms.judge({"p99_ms": 1e9})


def test_the_memory_of_a_worker_is_the_part_that_the_daemons_limit_counts() -> None:
    shared = {"rss_bytes": 10**15}  # with memory that other workers share
    worker_mb = Readings().of(SpanCounter("digits").end_window(), shared)["worker_mb"]
    assert worker_mb is not None
    assert worker_mb < 10**6


class Device:
    """A reporter with alarms, whose windows the test ends."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.now, self.facts = 0.0, {"temp_c": 40.0}
        self.logged: list[str] = []
        self.spool = Spool(folder / "telemetry.db")
        self.counter = SpanCounter("digits", lambda: self.now)
        self.reporter = Reporter(
            self.counter,
            self.spool,
            ReporterSettings(Topics("plant-a", "pi-07"), "b1", "r7"),
            clock=lambda: self.now,
            facts=lambda: self.facts,
            alarms=Alarms.of(AlarmConfig(**limits), 0, 0),
            log=self.logged.append,
        )

    def window(self, outcomes: dict[Outcome, int], took_us: int = 1000) -> None:
        for outcome, count in outcomes.items():
            for _ in range(count):
                self.counter.record(RequestSpan(outcome, took_us))
        self.now += 60
        self.reporter.tick()

    def said(self) -> list[dict[str, Any]]:
        payloads = [json.loads(message.payload) for message in self.spool.take(1000, 0)]
        return [payload for payload in payloads if "alarm" in payload]


def test_alarms_of_errors_and_slowness_and_heat_are_events_and_are_counted_in_the_metrics(tmp_path: Path) -> None:
    device = Device(tmp_path, p99_ms=20)
    device.facts["temp_c"] = 91.5
    for _ in range(2):
        device.window({"ok": 90, "error": 10}, took_us=30_000)
    said = {(event["event"], event["alarm"]): event for event in device.said()}
    assert set(said) == {("alarm_raised", name) for name in ("p99_ms", "error_share", "temp_c")}
    assert said["alarm_raised", "error_share"]["value"] == 0.1
    assert (
        said["alarm_raised", "temp_c"] | {"value": 91.5, "limit": 85, "model": "digits"}
        == said["alarm_raised", "temp_c"]
    )
    assert "digits: alarm_raised alarm=temp_c value=91.5 limit=85.0" in device.logged
    metrics = [json.loads(m.payload) for m in device.spool.take(1000, 0) if m.topic.endswith("metrics")]
    assert [m["alarms"] for m in metrics] == [0, 3]
    assert {name: value for name, value in metrics[1].items() if name.startswith("alarm_")} == {
        "alarm_p99_ms": pytest.approx(30, rel=0.011), "alarm_error_share": 0.1, "alarm_temp_c": 91.5
    }  # fmt: skip
    assert not any(name.startswith("alarm_") for name in metrics[0])


def test_a_few_failures_in_a_quiet_window_raise_no_alarm(tmp_path: Path) -> None:
    device = Device(tmp_path)
    for _ in range(4):
        device.window({"error": 5})
    assert not device.said()


def test_a_model_with_few_requests_raises_an_alarm_once_its_windows_together_hold_enough(tmp_path: Path) -> None:
    device = Device(tmp_path)
    for _ in range(8):  # two stretches of 20 requests
        device.window({"error": 5})
    assert [(event["event"], event["value"]) for event in device.said()] == [("alarm_raised", 1.0)]


def test_a_model_with_one_request_in_ten_windows_can_raise_an_alarm(tmp_path: Path) -> None:
    device = Device(tmp_path)
    for minute in range(24):
        device.window({"error": 1} if minute % 10 == 0 else {})
    assert [event["event"] for event in device.said()] == ["alarm_raised"]


def test_an_alarm_clears_twelve_windows_after_the_last_request(tmp_path: Path) -> None:
    device = Device(tmp_path, p99_ms=20)
    for _ in range(2):
        device.window({"ok": 15, "error": 10}, took_us=30_000)
    device.window({"error": 3})  # the beginning of a stretch
    assert set(device.reporter.alarms) == {"error_share"}
    for _ in range(9 + 11):
        device.window({})
    assert set(device.reporter.alarms) == {"error_share"}
    device.window({})
    assert device.reporter.alarms == ()
    assert device.said()[-1]["event"] == "alarm_cleared"


def test_each_change_of_the_alarms_is_reported_once(tmp_path: Path) -> None:
    device, heard = Device(tmp_path, temp_c=80), list[tuple[str, ...]]()
    device.reporter.alarms_changed = lambda: heard.append(device.reporter.alarms)
    for temp_c in (90.0, 90.0, 90.0, 50.0, 50.0, 50.0, 50.0):
        device.facts["temp_c"] = temp_c
        device.window({})
    assert heard == [("temp_c",), ()]


def test_the_alarm_of_a_model_without_requests_is_cleared_by_new_requests(tmp_path: Path) -> None:
    device = Device(tmp_path, silent_s=100)
    for _ in range(5):
        device.window({})
    assert not device.said()
    device.window({"ok": 1})
    for _ in range(3):
        device.window({})
    for _ in range(3):
        device.window({"ok": 1})
    assert [event["event"] for event in device.said()] == ["alarm_raised", "alarm_cleared"]


@pytest.mark.parametrize("text", ["error_share = 2", "temp_c = -1", "p99 = 5", "throttled = 1"])
def test_invalid_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="alarms"):
        parse_config(f'device = "d"\nprofile = "p"\n[alarms]\n{text}', "config.toml")
