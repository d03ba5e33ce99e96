"""The page in a real browser shows which device is slow, why and since when, and offers downloads."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from edgert_deploy.fleet.store.batch import MINUTE_MS
from tests.support.devices import wait_until
from tests.support.fleet import Pi, Sent, changed, publish, record
from tests.support.fleet_page import event, page_of, seen
from tests.support.servers.brokers import Broker
from tests.support.servers.browser import Browser, Page

MINUTES = 30
SLOW_SINCE = 12  # minutes ago
WIDTHS = pytest.mark.parametrize("width", [390, 1440])


@dataclass
class Plant:
    url: str
    fleet: list[Pi]
    now_ms: int


def reports(pi: Pi, now_ms: int) -> Sent:
    """Half an hour of a device that answers in 10 ms. `pi-2` takes 50 ms from SLOW_SINCE on, because of its queue."""
    sent: Sent = []
    for minute in range(MINUTES, -1, -1):
        slow = pi.topics.device == "pi-2" and minute < SLOW_SINCE
        took_ms = 50.0 if slow else 10.0
        queue = [41.0 if slow else 0.5] * 30
        window = pi.window(now_ms - minute * MINUTE_MS, [took_ms] * 30, engine=[9.0] * 30, queue=queue)
        # Windows are long, so that no device becomes stale on a slow machine before the test stops its reports.
        sent += window[:1] + changed(window[1:], lat_p99_ms=took_ms, window_s=600.0)
    return sent


@pytest.fixture(scope="module")
def plant(tmp_path_factory: Any) -> Iterator[Plant]:
    folder: Path = tmp_path_factory.mktemp("page")
    now_ms = time.time_ns() // 1_000_000
    small = [Pi(f"pi-{n}", version="r2", profile="pi-5") for n in range(4)]
    large = [Pi(f"nuc-{n:02}", version="r2" if n < 8 else "r1", profile="nuc", site="plant-b") for n in range(20)]
    fleet = [*small, *large]
    sent = {pi.topics.device: reports(pi, now_ms) for pi in fleet}
    idle = [
        (topic.replace("/digits/", "/faces/"), payload) for topic, payload in Pi("pi-0", boot="b2").window(now_ms, [])
    ]
    said = [message for pi in fleet for message in pi.info() + sent[pi.topics.device]] + idle
    said += event(small[1], 1, now_ms - 90_000, event="crashed", model="digits", reason="signal 11")
    said += event(small[3], 1, now_ms - 60_000, event="recycled", model="digits", reason="memory")
    record(str(folder / "fleet.db"), said, now_ms)
    (folder / "config").mkdir()
    (folder / "config" / "edgert.toml").write_text("[p99_target_ms]\ndigits = 20\n")
    words = ["--store", str(folder / "fleet.db"), "--listen", "127.0.0.1:0"]
    with Broker.in_folder(folder / "broker") as broker, page_of(broker, folder, words) as url:
        publish(broker, [message for pi in fleet for message in pi.info()], retain=True)
        for pi in fleet:
            publish(broker, sent[pi.topics.device][-8:])
        publish(broker, [(large[3].topics.status, b"lost")], retain=True)
        yield Plant(url, fleet, now_ms)


@pytest.fixture
def opened(browser: Browser, plant: Plant) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def open_page(path: str = "", width: int = 1440) -> Page:
        pages.append(browser.open(path if path.startswith("http") else plant.url + path, width=width))
        return pages[-1]

    yield open_page
    for page in pages:
        # Chromium counts a stream that the page closes, and a download, as aborted requests.
        assert [said for said in page.problems if "ERR_ABORTED" not in said] == []
        page.tab.context.close()


def address(page: Page) -> dict[str, str]:
    """Return the parameters in the page's address."""
    return {name: values[0] for name, values in parse_qs(urlsplit(page.evaluate("location.href")).query).items()}


def minutes_shown(page: Page) -> float:
    words = address(page)
    return float(page.evaluate("([a, b]) => (Date.parse(b) - Date.parse(a)) / 60000", [words["from"], words["to"]]))


def answered(page: Page) -> str:
    figure = "[...document.querySelectorAll('.figures div')].find((each) => each.innerText.startsWith('answered'))"
    return str(page.evaluate(f"{figure}?.innerText ?? ''"))


@WIDTHS
def test_the_first_page_shows_which_device_is_slow_and_why(opened: Callable[..., Page], width: int) -> None:
    page = opened("", width)
    seen(page, "Slow groups")
    for words in ("1 lost", "digits p99 50 ms, target 20 ms", "p99 target", "within 20.0 ms", "Stages over time", "Time by stage"):  # fmt: skip
        seen(page, words)
    first = "document.querySelector('.breakdown tbody tr')?.innerText ?? ''"
    wait_until(lambda: page.evaluate(first).split()[:2] == ["pi-2", "plant-a"], "the slowest device is the first")
    assert "5.0" in page.evaluate(first), "times the rest"
    # A rollout leaves 12 devices behind. They do not hide the device that is lost.
    table = "document.querySelector('[aria-labelledby=attention]').innerText"
    wait_until(lambda: "12 devices" in page.evaluate(table), "those behind are one line")
    assert page.evaluate(table).index("nuc-03") < page.evaluate(table).index("pi-2") < page.evaluate(table).index("12 devices")  # fmt: skip
    page.tab.click(".breakdown button:has-text('profiles')")
    wait_until(lambda: page.evaluate(first).split()[0] == "pi-5", "profiles are compared")
    assert address(page)["by"] == "profile"
    assert page.overflow_px() == 0
    assert page.violations() == []
    assert page.contrast_min()[0] >= 4.5
    page.tab.click(".breakdown a:has-text('pi-5')")
    wait_until(lambda: address(page).get("profile") == "pi-5", "a group is a filter")


@WIDTHS
def test_the_page_of_a_slow_device_shows_the_stage_that_grew(opened: Callable[..., Page], width: int) -> None:
    page = opened("device/plant-a/pi-2", width)
    seen(page, "Dots: p50; line: p99.")
    told = "[...document.querySelectorAll('.chart .legend li')].map((each) => each.textContent).join()"
    wait_until(lambda: "queue41.0/41.0" in page.evaluate(told), "the queue grew")
    stage = page.tab.locator(".stage").nth(1)
    stage.focus()
    page.tab.keyboard.press("Home")
    for _ in range(35):
        page.tab.keyboard.press("ArrowRight")
    wait_until(lambda: "queue0.495/0.495" in page.evaluate(told), "before, it was short")
    drawn = page.evaluate("document.querySelectorAll('.stage')[1].querySelectorAll('polyline').length")
    assert drawn >= 2
    assert page.overflow_px() == 0
    assert page.violations() == []


@WIDTHS
def test_a_period_can_be_zoomed_and_moved_and_its_address_shows_the_same_to_others(
    opened: Callable[..., Page], width: int, plant: Plant
) -> None:
    page = opened("", width)
    seen(page, "r1")
    stage = page.tab.locator(".stage").first
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    assert box is not None
    y = box["y"] + 60
    page.tab.mouse.move(box["x"] + box["width"] * 0.5, y)
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + box["width"] * 0.6, y)
    page.tab.mouse.move(box["x"] + box["width"] * 0.75, y)
    page.tab.mouse.up()
    wait_until(lambda: "from" in address(page), "the stretch is in the address")
    assert 10 <= minutes_shown(page) <= 25
    wait_until(lambda: answered(page) not in ("", "answered\n22.3 k"), "the figures are of the stretch")
    other = opened(page.evaluate("location.href"), width)
    wait_until(lambda: answered(other) == answered(page) != "", "another person sees the same requests")
    zoomed = minutes_shown(page)
    page.tab.click("[aria-label='Earlier']")
    wait_until(lambda: address(page) != address(other), "half a stretch earlier")
    assert minutes_shown(page) == zoomed
    page.tab.click("[aria-label='Zoom out']")
    wait_until(lambda: minutes_shown(page) > 1.8 * zoomed, "twice as much")
    page.tab.go_back()
    page.tab.go_back()
    wait_until(lambda: address(page) == address(other), "each step is in the history")
    page.tab.click("button:has-text('1 h')")
    wait_until(lambda: "from" not in address(page), "the last hour again")
    page.tab.click("button:has-text('Keep this time')")
    wait_until(lambda: 60 <= minutes_shown(page) <= 62, "the address names the hour")
    page.tab.click("button:has-text('From – to')")
    page.tab.fill("[data-key=from]", "2026-03-01T10:00")
    page.tab.fill("[data-key=to]", "2026-03-01T12:00")
    assert page.violations() == []
    page.tab.click(".dates button:has-text('Show')")
    seen(page, "2026-03-01 10:00 to 2026-03-01 12:00")
    seen(page, "No reports in this time")
    assert page.overflow_px() == 0


def test_a_period_can_be_marked_by_keyboard(opened: Callable[..., Page]) -> None:
    page = opened()
    seen(page, "r1")
    page.tab.locator(".stage").first.focus()
    page.tab.keyboard.press("End")
    for _ in range(9):
        page.tab.keyboard.press("Shift+ArrowLeft")
    assert "Enter zooms" in page.evaluate("document.querySelector('.chart [aria-live]').textContent")
    page.tab.keyboard.press("Escape")
    page.tab.keyboard.press("Enter")
    assert "from" not in address(page)
    page.tab.keyboard.press("Shift+ArrowLeft")
    for _ in range(8):
        page.tab.keyboard.press("Shift+ArrowLeft")
    page.tab.keyboard.press("Enter")
    wait_until(lambda: "from" in address(page), "the stretch is in the address")
    assert 9 <= minutes_shown(page) <= 11


def test_every_duration_is_a_valid_period_and_other_text_is_refused(opened: Callable[..., Page]) -> None:
    page = opened("?period=95m")
    wait_until(lambda: "22.3 k" in answered(page), "all requests are in it")
    pressed = "document.querySelector('.period [aria-pressed=true]').textContent"
    assert page.evaluate(pressed) == "95m"
    bad = opened("?period=soon")
    seen(bad, "'soon' is not a duration")
    assert bad.violations() == []
    refused = [said for said in bad.problems if "400" in said]
    assert len(refused) == len(bad.problems) > 0
    bad.tab.goto("about:blank")  # this page sends no more requests
    bad.problems.clear()  # the refusals are expected


@WIDTHS
def test_cells_of_the_map_show_their_names(opened: Callable[..., Page], width: int) -> None:
    page = opened("", width)
    wait_until(lambda: page.evaluate("document.querySelectorAll('.names a').length") == 4, "names in a small site")
    cells = page.tab.locator(".cells[data-site=plant-b]")
    wait_until(
        lambda: page.evaluate("document.querySelector('[data-site=plant-b] canvas').width") > 0, "cells in a large one"
    )
    cells.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
        page.tab.keyboard.press(key)
    tip = "document.querySelector('[data-site=plant-b] .tip')"
    assert page.evaluate(f"{tip}.innerText").strip() == "nuc-00: online"
    for _ in range(3):
        page.tab.keyboard.press("ArrowRight")
    assert page.evaluate(f"{tip}.innerText").strip() == "nuc-03: lost"
    assert page.overflow_px() == 0
    assert page.violations() == []
    page.tab.locator(".cells[data-site=plant-b] canvas").hover(position={"x": 3, "y": 3})
    assert page.evaluate(f"{tip}.innerText").strip() == "nuc-00: online"
    page.tab.locator(".cells[data-site=plant-b] canvas").click(position={"x": 3, "y": 3})
    wait_until(lambda: page.evaluate("location.pathname") == "/device/plant-b/nuc-00", "a click opens the device")


def test_an_idle_model_is_folded_and_a_search_is_one_step_of_the_history(opened: Callable[..., Page]) -> None:
    page = opened("", 390)
    seen(page, "No request in this time: show")
    assert not page.tab.locator("#model-faces-body").is_visible()
    page.tab.click("button:has-text('No request in this time')")
    assert page.tab.locator("#model-faces-body").is_visible()
    assert page.violations() == []
    page.tab.click("#nav a:has-text('Devices')")
    page.tab.locator("input[type=search]").press_sequentially("nuc-1", delay=300)
    seen(page, "10 devices")
    assert address(page)["q"] == "nuc-1"
    page.tab.go_back()
    wait_until(lambda: page.evaluate("location.pathname") == "/", "one step back is the page before")


def test_on_a_phone_the_items_that_need_attention_come_first(opened: Callable[..., Page]) -> None:
    page = opened("?site=plant-b", 390)
    seen(page, "its connection broke")
    top = "document.querySelector('[aria-labelledby={}]').getBoundingClientRect().top"
    wait_until(lambda: page.evaluate("document.querySelector('#model-digits')") is not None, "the model's card")
    places = [page.evaluate(top.format(name)) for name in ("attention", "model-digits", "map", "events")]
    assert places == sorted(places)
    shown = "[...document.querySelectorAll('.filters select')].filter((each) => each.checkVisibility()).length"
    assert page.evaluate(shown) == 1, "the filter that is set"
    page.tab.click("button:has-text('Filters (1)')")
    assert page.evaluate(shown) == 4


def test_events_are_shown_by_type(opened: Callable[..., Page]) -> None:
    page = opened("events", 390)
    seen(page, "signal 11")
    page.tab.select_option("[data-key=event]", "recycled")
    wait_until(lambda: "signal 11" not in page.evaluate("document.body.innerText"), "one type is left")
    seen(page, "memory")
    assert address(page)["event"] == "recycled"
    assert page.evaluate("[...document.querySelector('[data-key=event]').options].map((each) => each.text)") == [
        "all types", "crashed (1)", "recycled (1)",
    ]  # fmt: skip
    assert page.violations() == []


@pytest.mark.parametrize(
    ("path", "name", "column", "rows"),
    [
        ("", "digits over time as CSV", "p99_ms", 2 * MINUTES + 2),
        ("", "digits's histograms as CSV", "buckets", 2 * MINUTES + 2),
        ("", "digits's stages as CSV", "p50_ms", 2 * (MINUTES + 1)),
        ("", "digits by device as CSV", "distance", 24),
        ("", "devices that need attention as CSV", "why", 14),
        ("devices?q=nuc", "the devices as CSV", "state", 20),
        ("events?event=crashed", "the events as CSV", "reason", 1),
        ("device/plant-a/pi-2", "digits over time as CSV", "p99_ms", MINUTES + 1),
    ],
)
def test_tables_and_charts_can_be_downloaded(
    opened: Callable[..., Page], path: str, name: str, column: str, rows: int
) -> None:
    page = opened(path)
    link = page.tab.locator(f'[aria-label="{name}"]')
    link.wait_for()
    with page.tab.expect_download() as kept:
        link.click()
    read = list(csv.DictReader(Path(kept.value.path()).read_text().splitlines()))
    assert column in read[0]
    assert len(read) == rows
    with page.tab.expect_download() as kept:
        page.tab.locator(f'[aria-label="{name.replace("CSV", "JSON")}"]').click()
    assert json.loads(Path(kept.value.path()).read_text())
