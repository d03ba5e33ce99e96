"""The live state of a fleet follows the newest messages. Late, repeated and odd messages do no harm."""

from __future__ import annotations

import json

import pytest

from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.live_fleet import (
    ALARMS_MAX,
    MODELS_PER_DEVICE_MAX,
    P99_REQUESTS_MIN,
    P99S_KEPT,
    STALE_AFTER_WINDOWS,
    WINDOW_S_DEFAULT,
    DeviceState,
    Fleet,
    ReportedModel,
    alarms_of,
)
from tests.support.fleet import NOW_MS, Pi, Sent, changed, feed

WINDOW_MS = 60_000


class Clock:
    """A fleet's wall clock, which a test sets."""

    ms = NOW_MS


def a_fleet(devices_max: int = 10) -> tuple[Fleet, Clock]:
    clock = Clock()
    return Fleet(lambda: clock.ms, devices_max), clock


def device_of(fleet: Fleet, name: str = "pi-1") -> DeviceState:
    return fleet.devices["plant-a", name]


def metrics(pi: Pi, ts_ms: int, requests: int, **fields: object) -> Sent:
    """Return the figures of a window with `requests`."""
    return changed(pi.window(ts_ms, [1.0] * requests)[1:], **fields)


# --- a device


def test_a_device_without_reports_is_known_by_its_retained_messages() -> None:
    fleet, _ = a_fleet()
    feed(fleet, Pi("pi-1").info(), now=5.0, retained=True)
    device = device_of(fleet)
    assert (device.status, device.profile, device.heard_at, device.age_s(9.0)) == ("online", "pi", None, None)
    feed(fleet, Pi("pi-1").info(), now=8.0)
    assert (device.heard_at, device.age_s(9.0)) == (8.0, 1.0)


@pytest.mark.parametrize("status", ["online", "offline", "lost"])
def test_only_a_device_that_is_online_becomes_stale_and_only_after_its_limit(status: str) -> None:
    fleet, _ = a_fleet()
    feed(fleet, [(Pi("pi-1").topics.status, status.encode())], now=0.0)
    limit_s = STALE_AFTER_WINDOWS * WINDOW_S_DEFAULT
    assert device_of(fleet).state(limit_s) == status
    assert device_of(fleet).state(limit_s + 0.1) == ("stale" if status == "online" else status)


def test_a_window_without_a_length_does_not_make_a_device_stale_at_once() -> None:
    fleet, _ = a_fleet()
    feed(fleet, metrics(Pi("pi-1"), NOW_MS, 1, window_s=0.0))
    assert device_of(fleet).window_s == 1.0
    assert device_of(fleet).models["digits"].per_s is None


def test_empty_retained_messages_remove_a_device_and_keep_a_device_of_another_site() -> None:
    fleet, _ = a_fleet()
    feed(fleet, Pi("pi-1").info() + Pi("pi-1", site="plant-b").info())
    feed(fleet, [(Pi("pi-1").topics.deploy, b"")] * 2)
    assert list(fleet.devices) == [("plant-b", "pi-1")]
    assert fleet.refused == 0


def test_a_device_beyond_the_limit_is_refused_and_known_devices_are_still_updated() -> None:
    fleet, _ = a_fleet(devices_max=2)
    for name in ("pi-1", "pi-2", "pi-3"):
        feed(fleet, Pi(name).info())
    assert list(fleet.devices) == [("plant-a", "pi-1"), ("plant-a", "pi-2")]
    assert (fleet.refused, "choose one site with --site" in fleet.last_refusal) == (2, True)
    feed(fleet, [(Pi("pi-1").topics.status, b"lost"), (Pi("pi-2").topics.status, b"")])
    assert device_of(fleet).status == "lost"
    feed(fleet, Pi("pi-3").info())
    assert list(fleet.devices) == [("plant-a", "pi-1"), ("plant-a", "pi-3")], "a removed device makes room"


def test_the_delay_of_late_reports_is_measured_if_the_clock_is_right() -> None:
    fleet, clock = a_fleet()
    pi = Pi("pi-1")
    clock.ms = NOW_MS + 90_000
    feed(fleet, metrics(pi, NOW_MS, 1))
    assert device_of(fleet).late_s == 90.0
    feed(fleet, metrics(pi, NOW_MS + 1, 1, clock_synced=0))
    assert device_of(fleet).late_s == 0.0
    feed(fleet, metrics(pi, clock.ms + 50_000, 1))
    assert device_of(fleet).late_s == 0.0, "a clock ahead is not early"


# --- a model


def test_the_rate_is_computed_over_the_time_between_two_reports() -> None:
    fleet, clock = a_fleet()
    pi, clock.ms = Pi("pi-1"), NOW_MS + 10 * WINDOW_MS

    def rate_after(windows: int, requests: int) -> float | None:
        feed(fleet, metrics(pi, NOW_MS + windows * WINDOW_MS, requests))
        return device_of(fleet).models["digits"].per_s

    assert rate_after(0, 60) is None, "nobody knows when the first 60 were"
    assert rate_after(1, 120) == 2.0
    pi.window(NOW_MS + 2 * WINDOW_MS, [1.0] * 60)  # lost
    assert rate_after(3, 60) == 1.0, "120 in two minutes"
    pi.requests = 0
    assert rate_after(4, 6) == 1.0, "a worker that restarted tells no rate yet"
    assert device_of(fleet).models["digits"].requests == 6
    assert rate_after(5, 0) == 0.0


def test_a_late_or_repeated_report_does_not_change_the_figures() -> None:
    fleet, _ = a_fleet()
    pi = Pi("pi-1")
    first, second = metrics(pi, NOW_MS - WINDOW_MS, 10), metrics(pi, NOW_MS, 20)
    feed(fleet, second + first + second)
    model = device_of(fleet).models["digits"]
    assert (model.requests, model.ts_ms, model.per_s) == (30, NOW_MS, None)


def test_after_a_reboot_or_after_a_clock_that_was_ahead_an_earlier_time_is_accepted() -> None:
    fleet, _ = a_fleet()
    feed(fleet, metrics(Pi("pi-1"), NOW_MS, 10))
    feed(fleet, metrics(Pi("pi-1", boot="b2"), NOW_MS - 5, 3))
    assert device_of(fleet).models["digits"].requests == 3
    ahead = Pi("pi-2")
    feed(fleet, metrics(ahead, NOW_MS + 1, 10) + metrics(ahead, NOW_MS, 10))
    assert device_of(fleet, "pi-2").models["digits"].requests == 20


def test_the_p99_counts_only_for_windows_with_enough_requests_and_begins_anew_after_a_pause() -> None:
    fleet, clock = a_fleet()
    clock.ms = NOW_MS + 100 * WINDOW_MS
    pi, at = Pi("pi-1"), iter(range(NOW_MS, clock.ms, WINDOW_MS))

    def p99s_after(requests: int, p99_ms: float | None) -> tuple[float, ...]:
        more = {} if p99_ms is None else {"lat_p99_ms": p99_ms}
        feed(fleet, metrics(pi, next(at), requests, **more))
        return device_of(fleet).models["digits"].p99s

    assert p99s_after(P99_REQUESTS_MIN, 1.0) == (1.0,)
    assert p99s_after(P99_REQUESTS_MIN - 1, 99.0) == (1.0,)
    assert p99s_after(P99_REQUESTS_MIN, None) == (1.0,)
    assert p99s_after(P99_REQUESTS_MIN, 2.0) == (1.0, 2.0)
    for p99_ms in (3.0, 4.0):
        last = p99s_after(P99_REQUESTS_MIN, p99_ms)
    assert last == (2.0, 3.0, 4.0)[-P99S_KEPT:]
    pi.version = "r2"
    assert p99s_after(P99_REQUESTS_MIN, 5.0) == (5.0,)
    assert p99s_after(0, None) == ()


def test_figures_that_a_window_leaves_out_are_unknown() -> None:
    fleet, _ = a_fleet()
    feed(fleet, metrics(Pi("pi-1"), NOW_MS, 0))
    model = device_of(fleet).models["digits"]
    assert (model.p50_ms, model.p99_ms, model.batch_mean, model.rss_bytes) == (None, None, None, 0)
    assert ReportedModel().per_s is None


def test_a_device_with_too_many_models_keeps_its_known_models() -> None:
    fleet, _ = a_fleet()
    topic, payload = metrics(Pi("pi-1"), NOW_MS, 1)[0]
    for number in range(MODELS_PER_DEVICE_MAX + 1):
        fleet.apply(topic.replace("digits", f"m{number}"), payload, False, 0.0)
    assert len(device_of(fleet).models) == MODELS_PER_DEVICE_MAX
    assert (fleet.refused, f"more than {MODELS_PER_DEVICE_MAX} models" in fleet.last_refusal) == (1, True)
    assert device_of(fleet).heard_at == 0.0


# --- alarms


def test_alarms_of_models_and_of_the_device_are_added_and_removed() -> None:
    fleet, clock = a_fleet()
    pi = Pi("pi-1")
    feed(fleet, changed(pi.deploy(NOW_MS - 500, "temp_c", "shadow"), alarms="channel_stale", faces_alarms="failed"))
    device = device_of(fleet)
    assert device.alarms == {"": ("channel_stale",), "digits": ("shadow", "temp_c"), "faces": ("failed",)}
    assert (device.alarms_ms, device.model_names) == (NOW_MS - 500, {"digits", "faces"})
    feed(fleet, changed(pi.deploy(NOW_MS - 400, "shadow", "temp_c"), alarms="channel_stale", faces_alarms="failed"))
    assert device.alarms_ms == NOW_MS - 500, "the same alarms"
    clock.ms = NOW_MS - 350
    feed(fleet, pi.deploy(NOW_MS - 300))
    assert (device.alarms, device.alarms_ms, device.model_names) == ({}, NOW_MS - 350, set()), "no later than now"


@pytest.mark.parametrize(
    ("fields", "alarms"),
    [
        ({"digits_alarms": "b,a,,a"}, {"digits": ("a", "b")}),
        ({"digits_alarms": ""}, {}),
        ({"digits_alarms": ",, ,ä,<b>,-x"}, {}),
        ({"digits_alarms": 7, "alarms": 1.5}, {}),
        ({"digits_alarms": "n" * 65}, {}),
        ({"digits_alarms": "n" * 64}, {"digits": ("n" * 64,)}),
        ({"alarms": "own", "_alarms": "forged"}, {"": ("own",)}),
        ({"_alarms": "forged", "m_alarms_alarms": "a"}, {"m_alarms": ("a",)}),
        ({"\ud800_alarms": "a", "\x1b[2J_alarms": "a", "ä_alarms": "a", "<b>_alarms": "a"}, {}),
        ({f"{'n' * 65}_alarms": "a", f"{'n' * 64}_alarms": "a"}, {"n" * 64: ("a",)}),
    ],
)
def test_only_valid_ids_are_read_as_models_and_alarms(
    fields: dict[str, str | int | float], alarms: dict[str, tuple[str]]
) -> None:
    assert alarms_of(fields) == alarms


def test_alarms_are_bounded_in_number() -> None:
    many = ",".join(f"a{number}" for number in range(2 * ALARMS_MAX))
    alarms = alarms_of({f"m{number}_alarms": many for number in range(2 * MODELS_PER_DEVICE_MAX)})
    assert len(alarms) == MODELS_PER_DEVICE_MAX
    assert {len(names) for names in alarms.values()} == {ALARMS_MAX}


@pytest.mark.parametrize("model", ["\ud800", "half \ud83d of a pair", "\0", "\x1b[2J", "n" * 5000])
def test_a_device_that_invents_the_name_of_a_model_does_not_prevent_the_scrape_of_others(model: str) -> None:
    exporter = Exporter("b1", wall_clock=lambda: NOW_MS / 1000)
    forged = {"v": 1, "ts": NOW_MS, "boot": "b1", f"{model}_alarms": "temp_c"}
    feed(exporter, [("edgert/v1/plant-a/other/deploy", json.dumps(forged).encode())])
    feed(exporter, Pi("honest").info() + Pi("honest").deploy(NOW_MS, "temp_c"))
    exposition = Exposition(exporter)
    alarms = [line for line in exposition.text().encode().decode().splitlines() if line.startswith("edgert_alarm{")]
    assert alarms == ['edgert_alarm{site="plant-a",device="honest",model="digits",alarm="temp_c"} 1.0']
    assert b"honest" in exposition.protobuf()
