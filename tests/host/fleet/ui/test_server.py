"""Only users with access can read the page, and no user can change anything through it."""

from __future__ import annotations

import csv
import http.client
import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgert.errors import ConfigInvalid
from edgert_deploy.cli.fleet.query import query
from edgert_deploy.cli.fleet.ui import access_for
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui import answers as answers_module
from edgert_deploy.fleet.ui import server as page_server
from edgert_deploy.fleet.ui.access import Access
from edgert_deploy.fleet.ui.answers import Answers
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.live_views import LiveViews
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.fleet.ui.server import PageServer
from edgert_deploy.rollout.rollout_store import RolloutStore
from tests.support.devices import WAIT_S_MAX
from tests.support.fleet import NOW_MS, Pi, Watched, record, tell
from tests.support.fleet_page import get

NOW = 1000.0  # monotonic seconds
TOKEN = "a-token-of-this-test"


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Answers]:
    url, pi, fleet_state = str(tmp_path / "fleet.db"), Pi("pi-1"), Watched()
    record(url, pi.info() + pi.window(NOW_MS - 1, [1.0]))
    tell(fleet_state, pi.info() + pi.window(NOW_MS, [1.0]))
    query = FleetQuery(url)
    live_views = LiveViews(fleet_state, Rollouts(RolloutStore(tmp_path / "none")), lambda: NOW, lambda: NOW_MS)
    yield Answers(live_views, History(query, lambda: NOW_MS))
    live_views.close()
    query.close()


@contextmanager
def serving(answers: Answers, access: Access) -> Iterator[int]:
    server = PageServer(answers, access, "127.0.0.1", 0)
    yield server.port
    server.close()


def test_requests_from_other_sites_or_with_foreign_host_names_are_refused(answers: Answers) -> None:
    with serving(answers, access_for("127.0.0.1", ("fleet.lan",), None)) as port:
        for headers in (
            {"Host": "evil.example"},
            {"Host": f"evil.example:{port}"},
            {"Host": f"10.0.0.9:{port}"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        ):
            assert get(port, "/api/v1/devices", headers).status == 403, headers
        for headers in ({}, {"Host": "localhost"}, {"Host": f"[::1]:{port}"}, {"Host": f"FLEET.lan:{port}"},
                        {"Origin": f"http://127.0.0.1:{port}"}, {"Sec-Fetch-Site": "same-origin"}):  # fmt: skip
            assert get(port, "/api/v1/devices", headers).status == 200, headers
        # A link on another page may lead to this page. The user sees the page, but the other site cannot read it.
        assert get(port, "/devices", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status == 200


def test_only_the_own_files_of_the_page_are_served_and_no_request_can_write(answers: Answers) -> None:
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
            assert get(port, "/api/v1/devices", verb=verb).status == 405
        for path, code in (
            ("/api/v1/latency?period=9y", 400), ("/api/v1/devices?state=odd", 400), ("/api/v1/devices?sort=odd", 400),
            ("/api/v1/latency?site=%00", 400), ("/api/v1/device?site=a&device=b", 404), ("/api/v1/nothing", 404),
            ("/api/v1/devices?page=99999999999", 400), ("/api/v1/devices?page=999", 200), (f"/api/v1/devices?q={'x' * 3000}", 200),
            ("/api/v1/devices?" + "a=1&" * 50, 400), ("/api/v1/live?site=%00", 400),
            ("/api/devices", 404), ("/api/v2/devices", 404), ("/api/v1/devices?format=xml", 400),
            ("/api/v1/device?site=plant-a&device=pi-1&format=csv", 400), ("/api/v1/breakdown?by=colour", 400),
            ("/api/v1/latency?period=90m", 200), ("/api/v1/latency?period=90", 400), ("/api/v1/latency?period=10s", 400),
            ("/api/v1/latency?from=2026-11-22T10:00Z", 400), ("/api/v1/query?by=colour", 400), ("/api/v1/query?step=7s", 400),
            ("/api/v1/latency?from=2026-11-22T10:00Z&to=2026-11-22T09:00Z", 400), ("/api/v1/query?percentiles=x", 400),
            ("/api/v1/latency?from=2026-11-22T10:00&to=2026-11-22T11:00", 400), ("/api/v1/events?event=%3D1", 400),
        ):  # fmt: skip
            assert get(port, path).status == code, path


def test_the_body_of_a_request_is_not_read_as_another_request(answers: Answers) -> None:
    hidden = b"GET /api/v1/devices HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(answers, Access(frozenset())) as port:
        for length in (f"Content-Length: {len(hidden)}", "Transfer-Encoding: chunked"):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX) as sock,
                sock.makefile("rb") as answer,
            ):
                sock.sendall(f"GET /api/v1/rollouts HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode() + hidden)
                assert answer.read().count(b"HTTP/1.1 ") == 1


def test_beyond_loopback_only_requests_with_the_token_are_answered(answers: Answers, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\r\n", "utf-8-sig", newline="")  # as an editor on Windows writes it
    access = access_for("0.0.0.0", (), str(file))
    with serving(answers, access) as port:
        assert get(port, "/").status == 401
        assert get(port, "/api/v1/devices", {"Authorization": "Bearer wrong-token-wrong"}).status == 401
        assert get(port, "/?token=wrong").status == 401
        assert get(port, "/api/v1/devices", {"Authorization": f"Bearer {TOKEN}"}).status == 200
        let_in = get(port, f"//evil.example/?token={TOKEN}")
        assert (let_in.status, let_in.headers["Location"]) == (303, "/")
        cookie = let_in.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert get(port, "/", {"Cookie": cookie.partition(";")[0]}).status == 200
        assert get(port, "/", {"Cookie": "other=1; " + cookie.partition(";")[0]}).status == 200
        assert get(port, "/", {"Cookie": "bad=\x01"}).status == 400
        for odd in ("bad=;;", access.cookie, f"{access.cookie}=", f'{access.cookie}="' + "\\a" * 10_000 + '"'):
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


def test_the_number_of_open_streams_is_limited(answers: Answers) -> None:
    with serving(answers, Access(frozenset())) as port:
        open_ones = []
        for _ in range(page_server.STREAMS_MAX):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S_MAX)
            connection.request("GET", "/api/v1/live")
            answer = connection.getresponse()
            assert answer.readline() == b"retry: 2000\n"
            assert answer.readline() == b"event: fleet\n"
            open_ones.append((connection, answer))
        assert get(port, "/api/v1/live").status == 503
        assert get(port, "/api/v1/devices").status == 200
        for connection, answer in open_ones:
            answer.close()
            connection.close()


def test_every_list_can_be_downloaded_as_csv_and_json(answers: Answers) -> None:
    with serving(answers, Access(frozenset())) as port:
        for path, columns in (
            ("latency", {"begin", "model", "version", "answered", "p99_ms", "missing"}),
            ("breakdown?by=profile", {"model", "profile", "p99_ms", "rest_p99_ms", "distance"}),
            ("query?by=device&buckets=1&step=1h&percentiles=99.9", {"begin", "device", "p99.9_ms", "buckets"}),
            ("devices", {"site", "device", "state", "model", "version", "p99_ms"}),
        ):
            link = f"/api/v1/{path}{'&' if '?' in path else '?'}format="
            kept = get(port, link + "csv")
            assert kept.headers["Content-Type"].startswith("text/csv")
            assert kept.headers["Content-Disposition"] == f'attachment; filename="edgert-{path.partition("?")[0]}.csv"'
            (row,) = csv.DictReader(io.StringIO(kept.body.decode()))
            assert columns <= row.keys(), path
            assert "json" in get(port, link + "json").headers["Content-Type"]
        for path in ("events", "rollouts", "stages", "channels"):
            assert get(port, f"/api/v1/{path}?format=csv").status == 200


def test_a_large_fleet_is_compared_by_site_unless_devices_are_asked_for(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers.breakdown({})["by"] == "device"
    monkeypatch.setattr(answers_module, "COMPARED_MAX", 0)
    assert answers.breakdown({})["by"] == "site"
    assert answers.breakdown({"by": "device"})["models"][0]["groups"][0]["device"] == "pi-1"


def test_the_api_answers_a_query_as_the_command_does(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: NOW_MS * 1_000_000)
    with serving(answers, Access(frozenset())) as port:
        asked = "by=site,version&percentiles=50&period=2h&model=digits&step=1h&buckets=1"
        said = json.loads(get(port, f"/api/v1/query?{asked}").body)
    words = ["--by", "site,version", "--percentiles", "50", "--period", "2h", "--model", "digits", "--step", "1h"]
    told = CliRunner().invoke(query, ["--store", str(tmp_path / "fleet.db"), *words, "--buckets", "--json"])
    assert said == json.loads(told.stdout)
    assert said["groups"][0]["answered"] == 1
