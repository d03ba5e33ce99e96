"""The fleet's page: its numbers are those of merged histograms, only those who may can read it, and it keeps up."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import ConfigInvalid
from edgert.telemetry import messages
from edgert_deploy.cli.fleet_ui import access_for
from edgert_deploy.fleet.model import STAGES
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui import server as page_server
from edgert_deploy.fleet.ui.access import Access
from edgert_deploy.fleet.ui.answers import A_PAGE, Answers
from edgert_deploy.fleet.ui.board import Board, Filter
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.hub import Hub
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.fleet.ui.server import PageServer
from edgert_deploy.rollout.rollout_store import Rollout, RolloutStore
from edgert_deploy.rollout.waves import Strategy
from tests.support.brokers import Broker, until
from tests.support.browser import Browser, Page, Scheme
from tests.support.fleet import NOW_MS, Pi, Sent, publish, record

NOW = 1000.0  # monotonic seconds
TOKEN = "a-token-of-this-test"
HOSTILE = "<img src=x onerror='document.title=1'>"
_MAIN = "import sys; from edgert_deploy.cli import main; sys.exit(main())"


class Watched(Board):
    """A board whose wall clock the tests set."""

    def __init__(self) -> None:
        super().__init__(lambda: self.wall_ms)
        self.wall_ms = NOW_MS


def feed(board: Watched, sent: Sent, now: float = NOW, wall_ms: int = NOW_MS) -> None:
    board.wall_ms = wall_ms
    for topic, payload in sent:
        board.apply(topic, payload, False, now)


def changed(sent: Sent, **fields: Any) -> Sent:
    """The same reports with other fields."""
    return [(topic, json.dumps({**json.loads(payload), **fields}).encode()) for topic, payload in sent]


def event(pi: Pi, seq: int, ts_ms: int, **fields: Any) -> Sent:
    said = messages.envelope(ts_ms=ts_ms, boot=pi.boot, seq=seq) | fields
    return [(pi.topics.event, messages.dump(said))]


def state_of(board: Watched, device: str, now: float = NOW) -> tuple[str, str, int]:
    board.wall_ms = NOW_MS + int((now - NOW) * 1000)
    seen = board.seen_device("plant-a", device, now)
    assert seen is not None
    return seen.state, seen.why, seen.since_ms


# --- what is known now ----------------------------------------------------------------------


def test_a_device_is_in_its_worst_state_and_says_since_when() -> None:
    board = Watched()
    fleet = {name: Pi(name, version=version) for name, version in (("new", "r10"), ("old", "r9"), ("ill", "r10"))}
    for pi in fleet.values():
        feed(board, pi.info() + pi.window(NOW_MS, [1.0]))
    feed(board, event(fleet["ill"], 1, NOW_MS - 5000, event="alarm_raised", alarm="temp_c", value=90.0, limit=85.0))
    assert state_of(board, "new")[0] == "online"
    assert state_of(board, "old") == ("behind", "digits is r9, newest r10", NOW_MS)  # r10 > r9, though not as text
    assert state_of(board, "ill") == ("alarmed", "temp_c", NOW_MS - 5000)
    assert board.numbers("digits") == {"r9": 0, "r10": 1}
    assert state_of(board, "ill", NOW + 149)[0] == "alarmed"
    assert state_of(board, "ill", NOW + 151) == ("stale", "online, but sends nothing", NOW_MS)
    board.apply(fleet["new"].topics.status, b"lost", True, NOW)
    assert state_of(board, "new")[0] == "lost"
    feed(board, event(fleet["ill"], 2, NOW_MS, event="alarm_cleared", alarm="temp_c", value=60.0, limit=85.0))
    assert state_of(board, "ill")[0] == "online"
    board.apply(fleet["ill"].topics.status, b"lost", True, NOW)
    assert state_of(board, "old")[0] == "online"  # nobody that answers has r10
    late = Pi("late", version="r10")
    feed(board, late.info() + late.window(NOW_MS - 20 * MINUTE_MS, [1.0]))
    assert state_of(board, "late")[:2] == ("behind", "its reports are 20 min late")


def test_a_model_that_was_taken_away_is_forgotten_unless_it_left_an_alarm() -> None:
    board, pi = Watched(), Pi("pi-1")
    feed(board, [(topic.replace("digits", name), payload) for name in ("old", "ill", "digits") for topic, payload in pi.window(NOW_MS, [1.0])])  # fmt: skip
    feed(board, event(pi, 1, NOW_MS, event="quarantined", model="ill"))
    feed(board, pi.window(NOW_MS + 11 * MINUTE_MS, [1.0]), wall_ms=NOW_MS + 11 * MINUTE_MS)
    seen = board.seen_device("plant-a", "pi-1", NOW)
    assert seen is not None
    assert (sorted(seen.held.models), seen.state, seen.why) == (["digits", "ill"], "alarmed", "quarantined")


def test_what_the_store_knew_tells_since_when_a_device_is_silent_and_alarmed(store_url: str) -> None:
    url, pi = store_url, Pi("pi-1")
    hour_ago = NOW_MS - 60 * MINUTE_MS
    raised = event(pi, 1, hour_ago, event="alarm_raised", alarm="p99_ms", value=9.0, limit=5.0, model="digits")
    record(url, pi.info() + pi.window(hour_ago, [1.0]) + raised, hour_ago)
    query, board = FleetQuery(url), Watched()
    board.remember(query.devices(), NOW)
    board.remember_events(query.events(0, NOW_MS), NOW)
    assert state_of(board, "pi-1") == ("stale", "online, but sends nothing", hour_ago)
    feed(board, pi.window(NOW_MS, [1.0]))
    assert state_of(board, "pi-1") == ("alarmed", "p99_ms", hour_ago)
    query.close()


def test_stages_name_the_middle_device_and_the_slowest() -> None:
    board = Watched()
    for number in range(5):
        pi = Pi(f"pi-{number}")
        feed(board, pi.info() + changed(pi.window(NOW_MS, [1.0])[1:], engine_p99_ms=float(number)))
    (found,) = board.stages(Filter(model="digits"))
    engine = found["stages"][STAGES.index("engine")]
    assert (found["version"], found["devices"]) == ("r1", 5)
    assert engine == {"stage": "engine", "middle_ms": 2.0, "slowest_ms": 4.0, "site": "plant-a", "device": "pi-4"}


def test_a_stream_says_only_what_has_changed_and_all_of_it_where_devices_came(tmp_path: Path) -> None:
    board, clock = Watched(), [NOW]
    hub = Hub(board, Rollouts(tmp_path / "none"), lambda: clock[0], lambda: NOW_MS)
    fleet = [Pi(f"pi-{number:05}") for number in range(10_000)]
    for pi in fleet:
        feed(board, pi.info())
    hub.tick()
    first = hub.view(Filter())
    assert first.counts["online"] == 10_000
    board.apply(fleet[7].topics.status, b"lost", True, NOW)
    assert hub.view(Filter()) is first  # until the next tick, whoever asks
    hub.tick()
    change = hub.view(Filter()).since(first)
    assert change is not None
    assert change["changed"] == [["plant-a", 7, "l"]]
    assert len(json.dumps(change)) < 2000
    feed(board, Pi("zz").info())
    hub.tick()
    assert hub.view(Filter()).since(first) is None
    listed = Answers(hub, None).devices(Filter(), {"state": "", "page": "3", "sort": "device"})  # type: ignore[arg-type]
    assert (listed["total"], len(listed["devices"]), listed["devices"][0]["device"]) == (10_001, A_PAGE, "pi-00100")


# --- what was ------------------------------------------------------------------------------


def test_curves_are_percentiles_of_merged_histograms_with_a_mark_where_a_version_begins(store_url: str) -> None:
    url, sent = store_url, list[tuple[str, bytes]]()
    slow, quick, new = Pi("slow"), Pi("quick"), Pi("quick", version="r2", boot="b2")
    for minute in range(10, 0, -1):
        ts_ms = NOW_MS - minute * MINUTE_MS
        sent += slow.window(ts_ms, [100.0] * 3) + (quick if minute > 4 else new).window(ts_ms, [1.0] * 97)
    record(url, slow.info() + quick.info() + sent)
    query = FleetQuery(url)
    said = History(query, lambda: NOW_MS).curves("15m", {})
    (model,) = said["models"]
    r1, r2 = model["versions"]
    # A mean of the devices' p95 would be 50.
    assert r1["p95"][4] == pytest.approx(1.0, rel=0.011)
    assert r1["p99"][4] == pytest.approx(100.0, rel=0.011)
    assert r2["p99"][11] == pytest.approx(1.0, rel=0.011)
    assert r2["p99"][:10] == [None] * 10
    assert model["marks"] == [{"version": "r2", "at_ms": (NOW_MS // MINUTE_MS - 4) * MINUTE_MS}]
    assert sum(number for _, _, number in model["heat"]["cells"]) == model["answered"] == 1000
    rows = {row for _, row, _ in model["heat"]["cells"]}
    assert rows == {-1, 26}  # 2^(-1/4) < 1 <= 2^0 and 2^(26/4) < 100 <= 2^(27/4)
    day = History(query, lambda: NOW_MS).curves("24h", {})
    many = History(query, lambda: NOW_MS, rows_max=100).curves("24h", {})
    assert (day["step_ms"], many["step_ms"]) == (15 * MINUTE_MS, 60 * MINUTE_MS)  # of two groups
    assert day["models"][0]["p99_ms"] == many["models"][0]["p99_ms"] == model["p99_ms"]
    with pytest.raises(ConfigInvalid, match="15m, 1h, 24h, 7d"):
        History(query, lambda: NOW_MS).curves("9y", {})
    query.close()


def test_rollouts_are_read_from_disk_and_one_that_nobody_works_on_is_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    rollouts = Rollouts(folder)
    rollouts.look()
    assert (rollouts.shown, rollouts.revision, folder.exists()) == ([], 0, False)
    names = tuple(f"pi-{number}" for number in range(10))
    failed = {"result": "failed", "error": {"code": "transport.unreachable", "message": "no answer"}}
    outcomes: dict[str, Any] = {"pi-0": {"result": "live", "error": None}, "pi-1": failed}
    rollout = Rollout(
        "digits-1", "b", "d", "digits", 7, "i", names, Strategy.parse(1, "50%,100%", "3", 8, 0), 30.0, outcomes=outcomes
    )  # fmt: skip
    store = RolloutStore(folder)
    store.write(rollout)
    with store.at_work("digits-1"):
        rollouts.look()
        (shown,) = rollouts.shown
        assert (shown["state"], shown["took"], shown["failed_count"], shown["version"]) == ("running", 1, 1, "r7")
        assert shown["waves"] == [
            {"devices": 1, "took": 1, "failed": 0, "left": 0},
            {"devices": 4, "took": 0, "failed": 1, "left": 3},
            {"devices": 5, "took": 0, "failed": 0, "left": 5},
        ]
    rollouts.look()
    assert (rollouts.shown[0]["state"], rollouts.revision) == ("cut off", 2)


# --- who may read it ------------------------------------------------------------------------


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Answers]:
    url, pi, board = str(tmp_path / "fleet.db"), Pi("pi-1"), Watched()
    record(url, pi.info() + pi.window(NOW_MS, [1.0]))
    feed(board, pi.info() + pi.window(NOW_MS, [1.0]))
    query = FleetQuery(url)
    hub = Hub(board, Rollouts(tmp_path / "none"), lambda: NOW, lambda: NOW_MS)
    yield Answers(hub, History(query, lambda: NOW_MS))
    hub.close()
    query.close()


@contextmanager
def serving(answers: Answers, access: Access) -> Iterator[int]:
    server = PageServer(answers, access, "127.0.0.1", 0)
    yield server.port
    server.close()


def get(port: int, path: str, headers: dict[str, str] | None = None, verb: str = "GET") -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(verb, path, headers={"Host": f"127.0.0.1:{port}", **(headers or {})})
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def test_other_sites_and_names_that_were_made_to_point_here_are_refused(answers: Answers) -> None:
    with serving(answers, access_for("127.0.0.1", ("fleet.lan",), None)) as port:
        for headers in (
            {"Host": "evil.example"},
            {"Host": f"evil.example:{port}"},
            {"Host": f"10.0.0.9:{port}"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        ):
            assert get(port, "/api/devices", headers).status == 403, headers
        for headers in ({}, {"Host": "localhost"}, {"Host": f"[::1]:{port}"}, {"Host": f"FLEET.lan:{port}"},
                        {"Origin": f"http://127.0.0.1:{port}"}, {"Sec-Fetch-Site": "same-origin"}):  # fmt: skip
            assert get(port, "/api/devices", headers).status == 200, headers
        # A link on another page may lead here: it shows the page, and nobody else reads it.
        assert get(port, "/devices", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status == 200


def test_nothing_but_the_page_s_own_files_is_handed_out_and_nothing_can_be_written(answers: Answers) -> None:
    with serving(answers, Access(frozenset())) as port:
        page = get(port, "/device/plant-a/pi-1")
        assert page.status == 200
        assert b"<!doctype html>" in page.body
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        assert get(port, "/", {"If-None-Match": get(port, "/").headers["ETag"]}).status == 304
        for path in (
            "/assets/../server.py",
            "/assets/%2e%2e/server.py",
            "/assets/..%2fserver.py",
            "/nothing",
            "/assets/",
        ):
            assert get(port, path).status == 404, path
        assert get(port, "http://[").status == 400
        for verb in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert get(port, "/api/devices", verb=verb).status == 501
        for path, code in (
            ("/api/history?window=9y", 400), ("/api/devices?state=odd", 400), ("/api/devices?sort=odd", 400),
            ("/api/history?site=%00", 400), ("/api/device?site=a&device=b", 404), ("/api/nothing", 404),
            ("/api/devices?page=99999999999", 200), (f"/api/devices?q={'x' * 3000}", 200),
            ("/api/devices?" + "a=1&" * 50, 400), ("/api/live?site=%00", 400),
        ):  # fmt: skip
            assert get(port, path).status == code, path


def test_what_a_request_has_for_a_body_is_no_request_of_its_own(answers: Answers) -> None:
    hidden = b"GET /api/devices HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(answers, Access(frozenset())) as port:
        for length in (f"Content-Length: {len(hidden)}", "Transfer-Encoding: chunked"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as sock, sock.makefile("rb") as answer:
                sock.sendall(f"GET /api/rollouts HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode() + hidden)
                assert answer.read().count(b"HTTP/1.1 ") == 1


def test_beyond_loopback_only_those_with_the_token_read(answers: Answers, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    access = access_for("0.0.0.0", (), str(file))
    with serving(answers, access) as port:
        assert get(port, "/").status == 401
        assert get(port, "/api/devices", {"Authorization": "Bearer wrong-token-wrong"}).status == 401
        assert get(port, "/?token=wrong").status == 401
        assert get(port, "/api/devices", {"Authorization": f"Bearer {TOKEN}"}).status == 200
        let_in = get(port, f"//evil.example/?token={TOKEN}")
        assert (let_in.status, let_in.headers["Location"]) == (303, "/evil.example/")
        cookie = let_in.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert get(port, "/", {"Cookie": cookie.partition(";")[0]}).status == 200
        assert get(port, "/", {"Cookie": "other=1; " + cookie.partition(";")[0]}).status == 200
        for odd in ("bad=;;\x01", access.cookie, f"{access.cookie}=", f'{access.cookie}="' + "\\a" * 20_000 + '"'):
            assert get(port, "/", {"Cookie": odd}).status == 401
        assert get(port, "/", {"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}).status == 403
        assert get(port, "/", {"Host": f"10.0.0.9:{port}", "Authorization": f"Bearer {TOKEN}"}).status == 200
    assert access_for("127.0.0.1", (), None).token is None
    other = access_for("192.0.2.1", (), None).token
    assert other is not None
    assert len(other) > 30
    file.write_text("short")
    with pytest.raises(ConfigInvalid, match="16 or more"):
        access_for("127.0.0.1", (), str(file))


def test_only_so_many_streams_are_open_at_once(answers: Answers) -> None:
    with serving(answers, Access(frozenset())) as port:
        open_ones = []
        for _ in range(page_server.STREAMS_MAX):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/api/live")
            answer = connection.getresponse()
            assert answer.readline() == b"retry: 2000\n"
            assert answer.readline() == b"event: fleet\n"
            open_ones.append((connection, answer))
        assert get(port, "/api/live").status == 503
        assert get(port, "/api/devices").status == 200
        for connection, answer in open_ones:
            answer.close()
            connection.close()


def test_a_page_shows_what_recorders_write_to_a_store_that_is_shared(store_url: str, tmp_path: Path) -> None:
    now_ms, pi = time.time_ns() // 1_000_000, Pi("pi-1")
    record(store_url, pi.info() + pi.window(now_ms - MINUTE_MS, [1.0] * 3), now_ms)
    words = ["--store", store_url, "--port", "0", "--json"]
    with Broker.in_folder(tmp_path / "broker") as broker, page_of(broker, tmp_path, words) as said:
        assert json.loads(said)["own_store"] is None
        port = int(json.loads(said)["url"].rpartition(":")[2].strip("/"))
        happened = event(pi, 1, now_ms, event="alarm_raised", alarm="temp_c", value=90.0, limit=85.0)
        window = pi.window(now_ms, [2.0] * 4)
        record(store_url, window + happened, now_ms)
        publish(broker, window + happened)

        def answer(path: str) -> Any:
            return json.loads(get(port, f"/api/{path}").body)

        until(lambda: answer("devices?state=alarmed")["total"] == 1, "the device is alarmed")
        until(lambda: answer("history?window=15m")["models"][0]["answered"] == 7, "both windows are in the curves")
        for path in ("history?window=7d&site=plant-a&profile=pi", "history?window=24h&device=pi-1"):
            assert answer(path)["models"][0]["answered"] == 7
        until(
            lambda: [each["alarm"] for each in answer("events?model=&profile=pi")["events"]] == ["temp_c"], "the event"
        )
        assert get(port, "/api/history?window=1h&site=nowhere").status == 200


# --- in a real browser, with a real broker --------------------------------------------------


@dataclass
class Running:
    """A fleet's page over a broker, with what devices sent so far."""

    broker: Broker
    url: str
    fleet: dict[str, Pi]
    now_ms: int


@pytest.fixture(scope="module")
def running(tmp_path_factory: Any) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("ui")
    with Broker.in_folder(folder / "broker") as broker, page_of(broker, folder, ["--port", "0"]) as url:
        yield _begun(broker, url, folder / "config" / "rollouts")
        assert list((folder / "state" / "edgert").glob("ui-*.db"))


@contextmanager
def page_of(broker: Broker, folder: Path, words: list[str]) -> Iterator[str]:
    """`edgert fleet ui` in a process of its own; what it printed on stdout."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "EDGERT_CONFIG_DIR": str(folder / "config")}
    env.pop("EDGERT_STORE", None)
    argv = [sys.executable, "-c", _MAIN, "fleet", "ui", "--broker", f"127.0.0.1:{broker.port}", *words]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.readline().strip()
        try:
            yield printed
        finally:
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=20)[1]
        assert process.returncode == 0, said
        assert "Traceback" not in said


def _begun(broker: Broker, url: str, rollouts: Path) -> Running:
    now_ms = time.time_ns() // 1_000_000
    fleet = {name: Pi(name, version="r7", profile="pi-5") for name in ("oven", "press", "saw", "belt")}
    said: Sent = []
    for number, pi in enumerate(fleet.values()):
        said += pi.info()
        for minute in range(30, -1, -1):
            sent = pi.window(now_ms - minute * MINUTE_MS, [2.0 + number] * 20 + [9.0])
            # Long windows: on a slow machine nobody falls silent before a test has them do so.
            said += sent[:1] + changed(sent[1:], engine_p99_ms=3.0 + number, queue_p99_ms=0.5, window_s=600.0)
    said += event(fleet["saw"], 1, now_ms, event="alarm_raised", alarm="temp_c", value=91.0, limit=85.0)
    said += event(fleet["belt"], 1, now_ms, event="recycled", model="digits", reason=HOSTILE)
    for first in range(0, len(said), 50):  # a client takes no more at once
        publish(broker, said[first : first + 50])
    names = tuple(fleet)
    outcomes = {"oven": {"result": "live", "error": None}}
    RolloutStore(rollouts).write(
        Rollout("digits-1", "b", "d", "digits", 7, "i", names, Strategy.parse(1, "", None, 8, 0), 30.0, "stopped", "by the user", now_ms / 1000, outcomes=outcomes)
    )  # fmt: skip
    return Running(broker, url, fleet, now_ms)


@pytest.fixture
def opened(browser: Browser, running: Running) -> Iterator[Any]:
    """Opens pages of what is `running`, and closes them after the test: an open page goes on asking."""
    pages: list[Page] = []

    def open_page(path: str = "", width: int = 1280, scheme: Scheme = "light") -> Page:
        pages.append(browser.open(running.url + path, width=width, scheme=scheme))
        return pages[-1]

    yield open_page
    for page in pages:
        page.tab.context.close()


def seen(page: Page, words: str, within_s: float = 15.0) -> None:
    until(lambda: words in page.evaluate("document.body.innerText"), f"the page says {words!r}", within_s)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1280, "light"), (1280, "dark")])
def test_the_overview_is_whole_and_readable_on_any_screen(
    opened: Any, running: Running, width: int, scheme: Scheme, tmp_path: Path
) -> None:
    page = opened("", width, scheme)
    seen(page, "Where the time goes")
    for words in ("plant-a", "4 of 4 online, 1 alarmed", "temp_c 91.0, limit 85.0", "1 of 4 devices took it", HOSTILE):
        seen(page, words)
    assert page.overflow_px() == 0
    ratio, text = page.contrast_min()
    assert ratio >= 4.5, text
    if (width, scheme) in ((390, "dark"), (1280, "light")):  # axe takes a second
        page.tab.click("text=Show as tables")
        assert page.violations() == []
    assert page.problems == []
    assert all(address.startswith(running.url) for address in page.requests)
    assert page.colours() > 20
    assert page.screenshot(tmp_path / f"overview-{width}-{scheme}.png").startswith(b"\x89PNG")


def test_a_deployment_s_effect_appears_without_a_reload(opened: Any, running: Running) -> None:
    page = opened("?window=15m")
    seen(page, "r7")
    page.evaluate("window.stillHere = true")
    pi = running.fleet["press"]
    deployed = Pi("press", version="r8", boot="b2")
    publish(running.broker, deployed.window(running.now_ms + 1000, [400.0] * 50))
    seen(page, "r8 begins")
    row = "document.querySelector('.readout tbody tr:nth-child(2)').innerText"
    until(lambda: page.evaluate(row).split()[:4] == ["r8", "400", "400", "400"], "the new version's percentiles")
    seen(page, "4 of 4 online, 1 alarmed, 2 behind")  # the others, now
    assert page.evaluate("window.stillHere")
    assert page.problems == []
    publish(running.broker, changed(pi.window(running.now_ms + 2000, [1.0]), seq=900))


def test_a_device_that_falls_silent_or_is_lost_changes_its_tile(opened: Any, running: Running) -> None:
    page = opened()
    label = "document.querySelector('.tile canvas')?.getAttribute('aria-label') ?? ''"
    until(lambda: "of 4 online" in page.evaluate(label), "the tile")
    drawn = "document.querySelector('.tile canvas').toDataURL()"
    before = page.evaluate(drawn)
    belt, oven = running.fleet["belt"], running.fleet["oven"]
    # A device whose windows last a second is silent after two and a half.
    publish(running.broker, changed(belt.window(running.now_ms + 1000, [1.0]), window_s=1.0))
    until(lambda: "1 stale" in page.evaluate(label), "the tile shows a stale device")
    publish(running.broker, [(oven.topics.status, b"lost")], retain=True)
    until(lambda: "1 lost" in page.evaluate(label), "the tile says that a device is lost")
    assert page.evaluate(drawn) != before
    seen(page, "online, but sends nothing")
    assert page.problems == []


def test_a_broker_that_is_gone_is_said_and_the_page_goes_on_when_it_is_back(opened: Any, running: Running) -> None:
    page = opened()
    seen(page, "plant-a")
    running.broker.stop()
    seen(page, "The broker is out of reach")
    assert page.violations() == []
    running.broker.start()
    until(lambda: page.evaluate("document.querySelector('#trouble').hidden"), "the page is content again", 30.0)
    publish(running.broker, [("edgert/v1/plant-a/saw/m/digits/hist/odd", b"{}")])
    seen(page, "1 message was not understood")


def test_the_keyboard_does_it_all_and_the_address_keeps_it(opened: Any) -> None:
    page = opened()
    seen(page, "plant-a")
    page.tab.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.tab.locator(".stage").first.focus()
    page.tab.keyboard.press("End")
    told = "document.querySelector('[aria-live]').textContent"
    until(lambda: page.tab.keyboard.press("ArrowLeft") or "r7: p50 " in page.evaluate(told), "a step with requests")
    assert "whole time" not in page.evaluate("document.querySelector('.readout').innerText")
    page.tab.locator("button:has-text('15 min')").focus()
    page.tab.keyboard.press("Enter")
    assert page.evaluate("location.search") == "?window=15m"
    assert page.evaluate("document.activeElement.textContent") == "15 min"
    page.tab.select_option("[data-key=filter-site]", "plant-a")
    page.tab.locator("#nav a:has-text('Devices')").focus()
    page.tab.keyboard.press("Enter")
    assert page.evaluate("location.pathname + location.search") == "/devices?site=plant-a&window=15m"
    page.tab.locator("input[type=search]").press_sequentially("sa")
    until(lambda: page.evaluate("document.querySelectorAll('tbody tr').length") == 1, "one device is left")
    page.tab.locator("tbody a").focus()
    page.tab.keyboard.press("Enter")
    seen(page, "What it says of itself")
    assert page.evaluate("document.activeElement.id") == "main"
    page.tab.go_back()
    seen(page, "1 device")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("device/plant-a/saw", "p99 of each stage, ms"),
        ("device/plant-a/nobody", "is known here"),
        ("rollouts", "edgert rollout resume digits-1"),
        ("events?window=7d", "alarm raised"),
        ("?site=nowhere", "No device fits"),
    ],
)
def test_every_page_can_be_opened_by_its_address(opened: Any, path: str, words: str) -> None:
    page = opened(path, 390, "dark")
    seen(page, words)
    assert page.overflow_px() == 0
    assert page.violations() == []
    assert page.contrast_min()[0] >= 4.5
