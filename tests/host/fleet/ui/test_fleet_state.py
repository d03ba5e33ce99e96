"""A device is in the worst state that applies, with the reason and the time of the state."""

from __future__ import annotations

import json

import pytest

from edgert_deploy.fleet.live_percentiles import LivePercentiles
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui.fleet_state import Filter
from edgert_deploy.fleet.ui.history import baselines
from tests.support.fleet import NOW_MS, Pi, Sent, Watched, changed, record, tell

NOW = 1000.0  # monotonic seconds


def state_of(fleet_state: Watched, device: str, now: float = NOW) -> tuple[str, str, int]:
    fleet_state.wall_ms = NOW_MS + int((now - NOW) * 1000)
    seen = fleet_state.view_of("plant-a", device, now)
    assert seen is not None
    return seen.state, seen.why, seen.since_ms


def test_a_device_is_shown_in_its_worst_state_with_the_time_of_its_begin() -> None:
    fleet_state = Watched()
    fleet = {name: Pi(name, version=version) for name, version in (("new", "r10"), ("old", "r9"), ("ill", "r10"))}
    for pi in fleet.values():
        tell(fleet_state, pi.info() + pi.window(NOW_MS, [1.0]))
    tell(fleet_state, fleet["ill"].deploy(NOW_MS - 5000, "temp_c"))
    assert state_of(fleet_state, "new")[0] == "online"
    assert state_of(fleet_state, "old") == (
        "behind",
        "digits is r9, newest r10",
        NOW_MS,
    )  # r10 > r9, although not as text
    assert state_of(fleet_state, "ill") == ("alarmed", "temp_c", NOW_MS - 5000)
    assert fleet_state.numbers("digits") == {"r9": 0, "r10": 1}
    assert state_of(fleet_state, "ill", NOW + 149)[0] == "alarmed"
    assert state_of(fleet_state, "ill", NOW + 151) == ("stale", "online, but sends nothing", NOW_MS)
    fleet_state.apply(fleet["new"].topics.status, b"lost", True, NOW)
    assert state_of(fleet_state, "new")[0] == "lost"
    tell(fleet_state, fleet["ill"].deploy(NOW_MS))
    assert state_of(fleet_state, "ill")[0] == "online"
    fleet_state.apply(fleet["ill"].topics.status, b"lost", True, NOW)
    assert state_of(fleet_state, "old")[0] == "online"  # no device that sends reports has r10
    late = Pi("late", version="r10")
    tell(fleet_state, late.info() + late.window(NOW_MS - 20 * MINUTE_MS, [1.0]))
    assert state_of(fleet_state, "late")[:2] == ("behind", "its reports are 20 min late")


def test_a_description_that_arrives_late_does_not_replace_a_newer_one() -> None:
    fleet_state, pi = Watched(), Pi("pi-1")
    tell(fleet_state, pi.deploy(NOW_MS - 1000) + pi.deploy(NOW_MS - 5000, "temp_c"))
    assert fleet_state.devices["plant-a", "pi-1"].alarms == {}
    tell(fleet_state, Pi("pi-1", boot="b2").deploy(NOW_MS - 9000, "temp_c"))
    assert fleet_state.devices["plant-a", "pi-1"].alarms == {"digits": ("temp_c",)}, "another boot has another clock"
    ahead = Pi("pi-2")
    tell(fleet_state, ahead.deploy(NOW_MS + 3_600_000) + ahead.deploy(NOW_MS, "temp_c"))
    assert fleet_state.devices["plant-a", "pi-2"].alarms == {"digits": ("temp_c",)}, "its clock was ahead, and was set"


def test_a_model_that_was_removed_is_forgotten_and_a_model_that_cannot_serve_is_an_alarm() -> None:
    fleet_state, pi = Watched(), Pi("pi-1")
    tell(fleet_state, [(topic.replace("digits", name), payload) for name in ("old", "ill", "digits") for topic, payload in pi.window(NOW_MS, [1.0])])  # fmt: skip
    tell(fleet_state, changed(pi.deploy(NOW_MS), ill_alarms="quarantined"))
    tell(fleet_state, pi.window(NOW_MS + 11 * MINUTE_MS, [1.0]), wall_ms=NOW_MS + 11 * MINUTE_MS)
    seen = fleet_state.view_of("plant-a", "pi-1", NOW)
    assert seen is not None
    assert (sorted(seen.device.models), seen.state, seen.why) == (["digits"], "alarmed", "quarantined")


def test_an_alarm_of_the_device_itself_makes_the_device_alarmed() -> None:
    fleet_state, pi = Watched(), Pi("pi-1")
    tell(fleet_state, pi.window(NOW_MS, [1.0]) + changed(pi.deploy(NOW_MS), alarms="channel_stale"))
    assert state_of(fleet_state, "pi-1") == ("alarmed", "channel_stale", NOW_MS)


def test_the_store_has_the_times_since_which_a_device_is_silent_and_alarmed(store_url: str) -> None:
    url, pi = store_url, Pi("pi-1")
    hour_ago = NOW_MS - 60 * MINUTE_MS
    record(url, pi.info() + pi.window(hour_ago, [1.0]) + pi.deploy(hour_ago, "p99_ms"), hour_ago)
    query, fleet_state = FleetQuery(url), Watched()
    fleet_state.load_devices(query.devices(), NOW)
    assert state_of(fleet_state, "pi-1") == ("stale", "online, but sends nothing", hour_ago)
    tell(fleet_state, pi.window(NOW_MS, [1.0]))
    assert state_of(fleet_state, "pi-1") == ("alarmed", "p99_ms", hour_ago)
    query.close()


def test_a_page_that_opens_late_shows_every_active_alarm_of_500_devices() -> None:
    """A page that opens later, and `watch --once`, receive only retained messages."""
    fleet = [Pi(f"pi-{number:03}") for number in range(500)]
    retained = [message for n, pi in enumerate(fleet) for message in pi.info() + pi.deploy(NOW_MS - 7000, *(["temp_c"] if n % 125 == 0 else []))]  # fmt: skip
    fleet_state, terminal = Watched(), LivePercentiles()
    for message in retained:
        fleet_state.apply(*message, True, NOW)
        terminal.apply(*message, True, NOW)
    alarmed = [each for each in fleet_state.views(Filter(), NOW) if each.state == "alarmed"]
    assert [(each.device.device, each.alarms, each.since_ms) for each in alarmed] == [
        (f"pi-{number:03}", ("temp_c",), NOW_MS - 7000) for number in (0, 125, 250, 375)
    ]
    assert [row.device for row in terminal.rows(NOW) if row.device and row.alarms] == [
        each.device.device for each in alarmed
    ]


def test_an_idle_device_has_no_percentile_in_any_list() -> None:
    fleet_state, pi = Watched(), Pi("pi-1")
    tell(fleet_state, pi.info() + pi.window(NOW_MS, []))
    seen = fleet_state.view_of("plant-a", "pi-1", NOW)
    assert seen is not None
    line = seen.device.models["digits"]
    assert (line.p50_ms, line.p99_ms, line.batch_mean) == (None, None, None)


def paced(pi: Pi, *p99s_ms: float, begin: int = 0, requests: int = 30) -> Sent:
    """Return windows of a minute each, with these p99s."""
    sent: Sent = []
    for number, p99_ms in enumerate(p99s_ms, start=begin):
        window = pi.window(NOW_MS + number * MINUTE_MS, [1.0] * requests)
        sent += window[:1] + changed(window[1:], lat_p99_ms=p99_ms)
    return sent


def test_a_device_that_stays_far_from_its_peers_is_shown_as_slow_with_the_difference() -> None:
    fleet_state = Watched()
    fleet = [Pi(f"pi-{n}") for n in range(4)]
    other = Pi("nuc", profile="nuc")
    for pi in (*fleet, other):
        tell(fleet_state, pi.info())
    for pi in fleet[:3]:
        tell(fleet_state, paced(pi, 10.0, 10.0, 10.0, 10.0))
    tell(fleet_state, paced(other, 90.0, 90.0, 90.0))  # another profile has its own baseline
    tell(fleet_state, paced(fleet[3], 10.0, 10.0, 31.0, 32.0))
    assert state_of(fleet_state, "pi-3")[0] == "online", "two windows are not enough"
    tell(fleet_state, paced(fleet[3], 33.0, begin=4))
    assert state_of(fleet_state, "pi-3", NOW + 1)[:2] == ("slow", "digits p99 33 ms, 3.3 times its baseline")
    since_ms = state_of(fleet_state, "pi-3", NOW + 2)[2]
    assert since_ms == state_of(fleet_state, "pi-3", NOW + 60)[2]
    assert state_of(fleet_state, "nuc")[0] == "online"
    assert state_of(fleet_state, "pi-0")[0] == "online"
    tell(fleet_state, paced(fleet[3], 15.0, begin=5))
    assert state_of(fleet_state, "pi-3")[0] == "online"


def test_a_model_that_is_slower_than_in_the_last_week_or_than_its_target_is_slow(store_url: str) -> None:
    pi, sent = Pi("pi-1"), list[tuple[str, bytes]]()
    for quarter in range(20, 0, -1):
        sent += pi.window(NOW_MS - quarter * 360 * MINUTE_MS, [10.0] * 120)
    for batch in (sent[:16], sent[16:]):  # windows of more than three days ago are used when they arrive
        record(store_url, pi.info() + batch, json.loads(batch[-1][1])["ts"])
    query = FleetQuery(store_url)
    usual_ms = baselines(query, NOW_MS)
    assert usual_ms == {("digits", "pi"): pytest.approx(10.0, rel=0.011)}
    query.close()
    fleet_state, wanted = Watched(), Watched({"digits": 50.0})
    for each in (fleet_state, wanted):
        again = Pi("pi-1", boot="b2")
        each.load_baselines(usual_ms)
        tell(each, again.info() + paced(again, 40.0, 40.0, 40.0))
    assert state_of(fleet_state, "pi-1")[:2] == ("slow", "digits p99 40 ms, 4.0 times its baseline")
    assert state_of(wanted, "pi-1")[0] == "online", "the target counts where there is one"
    tell(wanted, paced(again, 60.0, 60.0, 60.0, begin=3))
    assert state_of(wanted, "pi-1")[:2] == ("slow", "digits p99 60 ms, target 50 ms")
    tell(wanted, paced(again, 60.0, begin=6, requests=0))
    assert state_of(wanted, "pi-1")[0] == "online", "a model that nobody asks is not slow"
