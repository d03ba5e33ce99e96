"""`edgert fleet ui` in a real browser, with a real broker: live, by keyboard, on any screen."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgert.errors import ConfigInvalid
from edgert_deploy.cli.fleet.ui import ui
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from edgert_deploy.rollout.rollout_store import RolloutStore
from edgert_deploy.rollout.waves import Strategy
from tests.support.devices import wait_until
from tests.support.fleet import Pi, Sent, changed, publish, record, without
from tests.support.fleet_page import event, get, page_of, seen
from tests.support.servers.brokers import Broker
from tests.support.servers.browser import Browser, Page, Scheme

HOSTILE = "<img src=x onerror='document.title=1'>"


@dataclass
class Running:
    """A fleet's page with a broker to which devices have sent messages."""

    broker: Broker
    url: str
    fleet: dict[str, Pi]
    now_ms: int


@pytest.fixture(scope="module")
def running(tmp_path_factory: Any) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("ui")
    with Broker.in_folder(folder / "broker") as broker, page_of(broker, folder, ["--listen", "127.0.0.1:0"]) as url:
        yield _begun(broker, url, folder / "config" / "rollouts")
        assert list((folder / "state" / "edgert").glob("ui-*.db"))


def _begun(broker: Broker, url: str, rollouts: Path) -> Running:
    now_ms = time.time_ns() // 1_000_000
    fleet = {name: Pi(name, version="r7", profile="pi-5") for name in ("oven", "press", "saw", "belt")}
    said: Sent = []
    for number, pi in enumerate(fleet.values()):
        said += pi.info()
        for minute in range(30, -1, -1):
            sent = pi.window(now_ms - minute * MINUTE_MS, [2.0 + number] * 20 + [9.0], engine=[1.0 + number] * 21)
            # The windows are long, so that on a slow machine no device becomes silent before the test stops its
            # reports.
            said += sent[:1] + changed(sent[1:], window_s=600.0)
    said += event(fleet["saw"], 1, now_ms, event="alarm_raised", alarm="temp_c", value=91.0, limit=85.0)
    said += fleet["saw"].deploy(now_ms, "temp_c")
    said += event(fleet["belt"], 1, now_ms, event="recycled", model="digits", reason=HOSTILE)
    said += fleet["press"].info("stable")[:1] + fleet["press"].deploy(now_ms)
    said += fleet["press"].rolled_back(8, "p99_ms is 9 ms", now_ms)
    for first in range(0, len(said), 50):  # a client accepts no more messages at once
        publish(broker, said[first : first + 50])
    names = tuple(fleet)
    outcomes = {"oven": Outcome("oven", Result.LIVE)}
    RolloutStore(rollouts).write(
        Rollout(id="digits-1", bundle="b", digest="d", model="digits", release=7, inventory="i", devices=names, strategy=Strategy.parse(1, "", None, 8, 0), trial_s=30.0, state=RolloutState.STOPPED, reason="by the user", started_at=now_ms / 1000, outcomes=outcomes)
    )  # fmt: skip
    return Running(broker, url, fleet, now_ms)


@pytest.fixture
def opened(browser: Browser, running: Running) -> Iterator[Any]:
    """Opens pages of the server, and closes the pages after the test, because an open page sends requests."""
    pages: list[Page] = []

    def open_page(path: str = "", width: int = 1280, scheme: Scheme = "light") -> Page:
        pages.append(browser.open(running.url + path, width=width, scheme=scheme))
        return pages[-1]

    yield open_page
    for page in pages:
        page.tab.context.close()


def test_a_page_shows_the_reports_that_a_recorder_writes_to_a_shared_store(store_url: str, tmp_path: Path) -> None:
    now_ms, pi = time.time_ns() // 1_000_000, Pi("pi-1")
    record(store_url, pi.info() + pi.window(now_ms - MINUTE_MS, [1.0] * 3), now_ms)
    words = ["--store", store_url, "--listen", "127.0.0.1:0", "--json"]
    with Broker.in_folder(tmp_path / "broker") as broker, page_of(broker, tmp_path, words) as said:
        assert json.loads(said)["own_store"] is None
        port = int(json.loads(said)["url"].rpartition(":")[2].strip("/"))
        happened = event(pi, 1, now_ms, event="alarm_raised", alarm="temp_c", value=90.0, limit=85.0)
        happened += pi.deploy(now_ms, "temp_c")
        window = pi.window(now_ms, [2.0] * 4)
        record(store_url, window + happened, now_ms)
        publish(broker, window + happened)

        def answer(path: str) -> Any:
            return json.loads(get(port, f"/api/v1/{path}").body)

        wait_until(lambda: answer("devices?state=alarmed")["total"] == 1, "the device is alarmed")
        wait_until(lambda: answer("latency?period=15m")["models"][0]["answered"] == 7, "both windows are in the curves")
        for path in ("latency?period=7d&site=plant-a&profile=pi", "latency?period=24h&device=pi-1"):
            assert answer(path)["models"][0]["answered"] == 7
        wait_until(
            lambda: [each["alarm"] for each in answer("events?model=&profile=pi")["events"]] == ["temp_c"], "the event"
        )
        assert get(port, "/api/v1/latency?period=1h&site=nowhere").status == 200


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_shows_gaps_and_unsynchronized_clocks(browser: Browser, tmp_path: Path, width: int) -> None:
    ago_ms = time.time_ns() // 1_000_000 - 600_000
    holed, unsure = Pi("pi-1"), Pi("pi-2")
    sent = [message for n in range(20, 0, -1) for message in holed.window(ago_ms - n * MINUTE_MS, [1.0 + n])]
    sent = without(sent, *range(5, 12)) + unsure.window(ago_ms - 9_000_000, [2.0], clock_synced=0)
    url = f"{tmp_path}/fleet.db"
    record(url, holed.info() + unsure.info() + sent, ago_ms)
    with (
        Broker.in_folder(tmp_path / "broker") as broker,
        page_of(
            broker, tmp_path, ["--store", url, "--listen", "127.0.0.1:0", "--alerts", 'http://alerts.lan/?"']
        ) as at,
    ):
        page = browser.open(at, width=width, scheme="light")
        assert page.evaluate("document.querySelector('header .alerts').href") == "http://alerts.lan/?%22"
        for words in (
            "7 of 21 reports (33.3 %) missing, from plant-a/pi-1 (7)",
            "The newest report in the store came 10 min ago",
            "live, curves end 10 min ago",
            "Times of receipt, because the clock is not synchronized: plant-a/pi-2",
        ):
            seen(page, words)
        assert page.evaluate("document.querySelectorAll('.hole').length") == 1
        page.tab.click("text=Show as tables")
        seen(page, "reports missing")
        assert page.overflow_px() == 0
        assert page.violations() == []
        assert page.problems == []
        page.tab.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1280, "light"), (1280, "dark")])
def test_the_overview_is_complete_and_readable_on_every_screen(
    opened: Any, running: Running, width: int, scheme: Scheme, tmp_path: Path
) -> None:
    page = opened("", width, scheme)
    seen(page, "Time by stage")
    for words in ("plant-a", "4 of 4 online, 1 alarmed", "temp_c 91.0, limit 85.0", "1 of 4 devices kept it", HOSTILE):
        seen(page, words)
    assert page.overflow_px() == 0
    ratio, text = page.contrast_min()
    assert ratio >= 4.5, text
    if (width, scheme) in ((390, "dark"), (1280, "light")):  # axe takes a second, so it runs in two cases
        page.tab.click("text=Show as tables")
        assert page.violations() == []
    assert page.problems == []
    assert all(address.startswith(running.url) for address in page.requests)
    assert page.colours() > 20
    assert page.screenshot(tmp_path / f"overview-{width}-{scheme}.png").startswith(b"\x89PNG")


def test_the_effect_of_a_deployment_appears_without_a_reload(opened: Any, running: Running) -> None:
    page = opened("?period=15m")
    seen(page, "r7")
    page.evaluate("window.stillHere = true")
    pi = running.fleet["press"]
    deployed = Pi("press", version="r8", boot="b2")
    publish(running.broker, deployed.window(running.now_ms + 1000, [400.0] * 50))
    seen(page, "r8 begins")
    row = "document.querySelector('.readout tbody tr:nth-child(2)').innerText"
    wait_until(lambda: page.evaluate(row).split()[:4] == ["r8", "400", "400", "400"], "the new version's percentiles")
    seen(page, "4 of 4 online, 1 alarmed, 2 behind")  # now the other devices are behind
    assert page.evaluate("window.stillHere")
    assert page.problems == []
    publish(running.broker, changed(pi.window(running.now_ms + 2000, [1.0]), seq=900))


def test_a_device_that_falls_silent_or_is_lost_changes_its_tile(opened: Any, running: Running) -> None:
    page = opened()
    label = "document.querySelector('.tile')?.innerText ?? ''"
    wait_until(lambda: "of 4 online" in page.evaluate(label), "the tile")
    shapes = "[...document.querySelectorAll('.tile path')].map((each) => each.getAttribute('d')).join()"
    before = page.evaluate(shapes)
    belt, oven = running.fleet["belt"], running.fleet["oven"]
    # A device whose windows last a second is silent after 2.5 s. A single short window may have been cut off.
    for after_ms in (1000, 2000):
        publish(running.broker, changed(belt.window(running.now_ms + after_ms, [1.0]), window_s=1.0))
    wait_until(lambda: "1 stale" in page.evaluate(label), "the tile shows a stale device")
    publish(running.broker, [(oven.topics.status, b"lost")], retain=True)
    wait_until(lambda: "1 lost" in page.evaluate(label), "the tile says that a device is lost")
    assert page.evaluate(shapes) != before
    seen(page, "online, but sends nothing")
    assert page.problems == []


def test_the_page_reports_a_lost_broker_and_continues_when_the_broker_returns(opened: Any, running: Running) -> None:
    page = opened()
    seen(page, "plant-a")
    running.broker.stop()
    seen(page, "The broker cannot be reached")
    assert page.violations() == []
    running.broker.start()
    belt = running.fleet["belt"]

    def content() -> bool:
        publish(running.broker, belt.window(running.now_ms + 3000, [1.0]))  # this report is now the store's newest
        return bool(page.evaluate("document.querySelector('#trouble').hidden"))

    wait_until(content, "the page is content again")
    publish(running.broker, [("edgert/v1/plant-a/saw/m/digits/hist/odd", b"{}")])
    seen(page, "1 message was not understood")


def test_the_page_can_be_used_by_keyboard_and_its_address_keeps_the_view(opened: Any) -> None:
    page = opened()
    seen(page, "plant-a")
    page.tab.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.tab.locator(".stage").first.focus()
    page.tab.keyboard.press("End")
    told = "document.querySelector('.chart [aria-live]').textContent"
    wait_until(
        lambda: page.tab.keyboard.press("ArrowLeft") or "r7: p50 " in page.evaluate(told), "a step with requests"
    )
    assert "whole time" not in page.evaluate("document.querySelector('.readout').innerText")
    page.tab.locator("button:has-text('15 min')").focus()
    page.tab.keyboard.press("Enter")
    assert page.evaluate("location.search") == "?period=15m"
    assert page.evaluate("document.activeElement.textContent") == "15 min"
    page.tab.select_option("[data-key=filter-site]", "plant-a")
    page.tab.locator("#nav a:has-text('Devices')").focus()
    page.tab.keyboard.press("Enter")
    assert page.evaluate("location.pathname + location.search") == "/devices?site=plant-a&period=15m"
    page.tab.locator("input[type=search]").press_sequentially("sa")
    wait_until(lambda: page.evaluate("document.querySelectorAll('tbody tr').length") == 1, "one device is left")
    page.tab.locator("tbody a").focus()
    page.tab.keyboard.press("Enter")
    seen(page, "Facts")
    assert page.evaluate("document.activeElement.id") == "main"
    page.tab.go_back()
    seen(page, "1 device")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("device/plant-a/saw", "Each stage of all requests"),
        ("device/plant-a/nobody", "is known here"),
        ("rollouts", "edgert rollout resume digits-1"),
        ("rollouts", "Devices that rolled back or refused digits r8"),
        ("events?period=7d", "alarm raised"),
        ("?site=nowhere", "No device matches"),
    ],
)
def test_every_page_can_be_opened_by_its_address(opened: Any, path: str, words: str) -> None:
    page = opened(path, 390, "dark")
    seen(page, words)
    assert page.overflow_px() == 0
    assert page.violations() == []
    assert page.contrast_min()[0] >= 4.5


def test_an_address_of_alerts_that_a_browser_would_run_is_refused() -> None:
    error = CliRunner().invoke(ui, ["--broker", "127.0.0.1:1", "--alerts", "javascript:alert(1)"]).exception
    assert isinstance(error, ConfigInvalid)
    assert "http://HOST:9093" in error.message
