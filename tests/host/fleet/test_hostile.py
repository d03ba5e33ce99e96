"""No message of a device ends or blocks a program of the fleet. The programs show messages only as text."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rich.console import Console

from edgert_deploy.cli.fleet.watch import table_of
from edgert_deploy.fleet import listener, live_fleet
from edgert_deploy.fleet.export import counting as counting_module
from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.listener import WINDOW_S
from edgert_deploy.fleet.live_percentiles import LivePercentiles
from edgert_deploy.fleet.reports import NUMBER_END
from edgert_deploy.fleet.store import database, merged_rows, schema
from edgert_deploy.fleet.store import recorder as recorder_module
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.store import Store
from edgert_deploy.fleet.ui.answers import Answers, NotFound
from edgert_deploy.fleet.ui.fleet_state import Filter, FleetState
from edgert_deploy.fleet.ui.live_views import LiveViews
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.rollout.rollout_store import RolloutStore
from tests.support.fleet import NOW_MS, Pi, Sent, ask, feed, record

ESCAPE = "\x1b[2J[/red]<img>"
VALUES = (float("nan"), float("inf"), 10**400, -(10**400), 2**63, 1e300, -1, None, True, "", ESCAPE, "x" * 70)


def spoilt() -> Iterator[tuple[str, bytes]]:
    """Every field of every message with every odd value, and texts that are not messages."""
    pi = Pi("pi-1")
    said: Sent = pi.window(NOW_MS, [1.0, 2.0], engine=[0.5, 1.5])
    event = {
        "v": 1,
        "ts": NOW_MS,
        "boot": "b1",
        "seq": 1,
        "event": "alarm_raised",
        "alarm": "temp_c",
        "model": "digits",
    }
    said.append((pi.topics.event, json.dumps(event).encode()))
    for kind in ("info", "sys", "deploy"):
        said.append((f"edgert/v1/plant-a/pi-1/{kind}", b'{"v":1,"profile":"pi","temp_c":1.0}'))
    for topic, payload in said:
        fields = json.loads(payload)
        more = {"rss_bytes": 1, "lat_p99_ms": 1.0, "engine_p99_ms": 1.0, "batch_mean": 1.0}
        for name in fields | more:
            for value in VALUES:
                yield topic, json.dumps({**fields, name: value}).encode()
        for odd in (
            b"",
            b"garbage",
            b"[/red]",
            ESCAPE.encode(),
            b"[" * 60_000,
            b"9" * 5_000,
            payload.replace(b"1", b"1e999"),
        ):
            yield topic, odd
        for longer in ("digits", "pi-1", "plant-a"):
            yield topic.replace(longer, "n" * 65), payload
    for odd in (b"", b"[/red]", ESCAPE.encode()):
        yield pi.topics.status, odd
    yield (
        pi.topics.hist("digits"),
        json.dumps({**json.loads(said[0][1]), "zero": 10**400, "count": 10**400 + 2}).encode(),
    )


def strict(value: Any) -> str:
    """Parse JSON like a browser."""
    return json.dumps(value, allow_nan=False)


def test_a_recorder_refuses_invalid_reports_and_stores_valid_ones_beside_them(store_url: str) -> None:
    odd = list(spoilt())
    honest = Pi("pi-2").window(NOW_MS - 1, [1.0] * 5)
    recorder = record(store_url, [*odd, *honest])
    assert recorder.waiting == 0
    assert recorder.refused > len(odd) / 2
    groups = {answer.group["device"]: answer for answer in ask(store_url, 1, ("device",))}
    assert groups["pi-2"].latency.count == 5
    assert set(groups) <= {"pi-1", "pi-2"}


def test_prometheus_can_read_an_exporters_page_with_hostile_reports() -> None:
    for by in (("site", "model", "version"), ("site", "device", "model")):
        exporter = Exporter("b1", by, wall_clock=lambda: 0.0)
        exposition = Exposition(exporter)
        feed(exporter, spoilt())
        text = exposition.text()
        assert exposition.protobuf()
        assert "\x1b" not in text
        assert "nan" not in text.lower()


def test_the_terminal_gets_no_control_characters() -> None:
    for topic, payload in spoilt():
        state, shown = LivePercentiles(), io.StringIO()
        state.apply(topic, payload, False, 0.0)
        rows = state.rows(1.0)
        Console(file=shown, width=200).print(table_of(rows, state, 200))
        assert "\x1b" not in shown.getvalue(), payload
        strict([row.as_json() for row in rows])


@pytest.mark.parametrize("window_s", [-1.0, 1e18])
def test_an_odd_window_of_one_device_does_not_change_the_trend_of_others(window_s: float) -> None:
    state, honest = LivePercentiles(), Pi("honest")
    for minute in range(3):
        feed(state, honest.window(NOW_MS + minute * 60_000, [1.0]), minute * 60.0)
    before = state.rows(180.0)
    for topic, payload in Pi("other").window(NOW_MS, [1.0]):
        state.apply(topic, json.dumps({**json.loads(payload), "window_s": window_s}).encode(), True, 180.0)
    (fleet,) = (row for row in state.rows(180.0) if row.device is None)
    assert fleet.trend_p95_ms == before[-1].trend_p95_ms
    assert len(fleet.trend_p95_ms) == 3


def test_a_browser_can_read_the_json_of_the_page(tmp_path: Path) -> None:
    fleet_state = FleetState(lambda: NOW_MS)
    feed(fleet_state, Pi("pi-1").info())
    live_views = LiveViews(fleet_state, Rollouts(RolloutStore(tmp_path / "none")), lambda: 0.0, lambda: NOW_MS)
    answers = Answers(live_views, None)  # type: ignore[arg-type]
    for topic, payload in spoilt():
        fleet_state.apply(topic, payload, False, 0.0)
        live_views.tick()
        strict([live_views.view(Filter()).as_json(), answers.devices({})])
        with contextlib.suppress(NotFound):  # an empty retained message removes the device
            strict(answers.device({"site": "plant-a", "device": "pi-1"}))
    feed(fleet_state, Pi("pi-1").info())
    seen = fleet_state.view_of("plant-a", "pi-1", 0.0)
    assert seen is not None
    assert 0 <= seen.since_ms <= NOW_MS + 300_000


def test_too_large_counters_are_stored_as_the_largest_value_of_the_column(store_url: str) -> None:
    pi, sent = Pi("pi-1"), list[tuple[str, bytes]]()
    for _ in range(1100):
        for total in (NUMBER_END - 1, 0):
            pi.requests = total
            sent.append(pi.window(NOW_MS - 1, [])[1])
    assert record(store_url, sent).recorded == 2200
    record(store_url, Pi("pi-2").window(NOW_MS - 1, [1.0], uptime_s=1))
    (answer,) = ask(store_url, 1)
    assert answer.counters["requests"] == merged_rows.COUNTED_MAX


def test_a_device_that_invents_versions_leaves_room_for_others(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "STREAMS_MAX", streams_max := 200)
    made_up = [
        Pi("other", f"r{number}", boot=f"b{number}").window(NOW_MS - 5000 + number, [1.0])
        for number in range(streams_max + 20)
    ]
    sent = [message for window in made_up for message in window]
    honest = Pi("honest", "rh").window(NOW_MS - 1, [1.0])
    assert record(store_url, sent + honest).refused == 2 * 20
    assert len(ask(store_url, 1, ("device", "version"))) == streams_max + 1
    fleet_state = FleetState(lambda: NOW_MS)
    exporter = Exporter("b1", wall_clock=lambda: 0.0)
    for message in sent + honest:
        exporter.apply(*message, False, 0.0)
        fleet_state.apply(*message, False, 0.0)
    assert len(exporter.groups) == streams_max + 1
    assert len(fleet_state.numbers("digits")) == streams_max + 1
    for message in made_up[-1]:  # a device that is set up again and again is still accepted
        exporter.apply(*message, False, WINDOW_S + 1)
    assert len(exporter.groups) == streams_max + 2


def test_a_device_that_invents_boots_and_numbers_and_alarms_takes_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counting_module, "STREAMS_MAX", 50)
    exporter = Exporter("b1", wall_clock=lambda: 0.0)
    state, honest = LivePercentiles(), Pi("honest")
    windows = [honest.window(NOW_MS, [1.0]) for _ in range(6)]
    for number, window in enumerate(windows):
        for message in window + windows[0]:  # the first window again
            exporter.apply(*message, False, 0.0)
        for made_up in range(30):
            event = {"v": 1, "ts": 1, "boot": f"b{number}-{made_up}", "event": f"a{number}-{made_up}_alarm"}
            for seq in (1, 2_000_000):
                payload = json.dumps({**event, "seq": seq}).encode()
                for each in (exporter, state):
                    each.apply("edgert/v1/plant-a/other/event", payload, False, 0.0)
    (group,) = exporter.groups.values()
    assert group.latency.count == len(windows)
    many = {f"m{n}_alarms": ",".join(f"a{n}-{i}" for i in range(50)) for n in range(100)}
    said = json.dumps(
        {"v": 1, "ts": 1, "boot": "b", "digits_alarms": ",".join(f"a{n}" for n in range(999)), **many}
    ).encode()
    for odd in (said, b'{"v":1,"digits_alarms":",,<b>"}', b'{"v":1,"ts":"now","digits_alarms":7}', said):
        state.apply("edgert/v1/plant-a/other/deploy", odd, False, 0.0)
    (device,) = state.devices.values()
    assert len(device.alarms) == live_fleet.MODELS_PER_DEVICE_MAX
    assert len(device.alarms["digits"]) == live_fleet.ALARMS_MAX


def test_an_event_counts_only_for_its_own_device(store_url: str) -> None:
    event = {"v": 1, "ts": NOW_MS - 5, "boot": "b1", "seq": 1, "event": "rolled_back", "model": "digits", "release": 2}
    forged = {**event, "site": "plant-b", "device": "honest", "at_ms": "soon"}
    record(store_url, [("edgert/v1/plant-a/other/event", json.dumps(forged).encode())])
    fleet = FleetQuery(store_url)
    (kept,) = fleet.failures(NOW_MS - 1000, NOW_MS)
    fleet.close()
    assert (kept["site"], kept["device"], kept["at_ms"]) == ("plant-a", "other", NOW_MS - 5)


def columns_of(url: str) -> Sequence[str]:
    engine = database.open_engine(url, writes=False)
    with engine.connect() as connection:
        found = list(connection.scalars(sa.select(schema.device.c.device)))
    engine.dispose()
    return found


def test_large_reports_fill_no_memory_while_the_store_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "WAITING_BYTES_MAX", 100_000)
    recorder = Recorder(Store(str(tmp_path / "fleet.db")), lambda: NOW_MS)
    large = [
        (topic, payload[:-1] + b',"x":"' + b"x" * 50_000 + b'"}') for topic, payload in Pi("pi-1").window(NOW_MS, [1.0])
    ]
    feed(recorder, [*large, *Pi("pi-2").window(NOW_MS, [1.0])])
    assert (recorder.waiting, recorder.dropped) == (2, 2)
    recorder.flush()
    feed(recorder, Pi("pi-2").window(NOW_MS, [1.0]))
    recorder.flush()
    assert (recorder.recorded, recorder.dropped) == (4, 2)


def test_an_odd_report_does_not_delay_later_ones(tmp_path: Path) -> None:
    url = str(tmp_path / "fleet.db")
    store = Store(url)
    recorder = Recorder(store, lambda: NOW_MS)
    recorder.apply("edgert/v1/plant-a/pi-1/status", b"garbage", False, 0.0)
    recorder.flush()
    feed(recorder, Pi("pi-2").info())
    recorder.flush()
    store.close()
    assert columns_of(url) == ["pi-2"]
