"""Only those who may can read the page, and nobody can change anything through it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import ConfigInvalid
from edgert_deploy.cli.fleet_ui import access_for
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui import server as page_server
from edgert_deploy.fleet.ui.access import Access
from edgert_deploy.fleet.ui.answers import Answers
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.hub import Hub
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.fleet.ui.server import PageServer
from edgert_deploy.rollout.rollout_store import RolloutStore
from tests.support.fleet import NOW_MS, Pi, Watched, feed, record

NOW = 1000.0  # monotonic seconds
TOKEN = "a-token-of-this-test"


@pytest.fixture
def answers(tmp_path: Path) -> Iterator[Answers]:
    url, pi, board = str(tmp_path / "fleet.db"), Pi("pi-1"), Watched()
    record(url, pi.info() + pi.window(NOW_MS, [1.0]))
    feed(board, pi.info() + pi.window(NOW_MS, [1.0]))
    query = FleetQuery(url)
    hub = Hub(board, Rollouts(RolloutStore(tmp_path / "none")), lambda: NOW, lambda: NOW_MS)
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
            assert get(port, "/api/devices", verb=verb).status == 405
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
