"""Many clients send heads and bodies slowly, or do not read their answers: all good requests still succeed.

The tests attack every HTTP server of the product: on a device, in the exporter, and for the fleet page.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.export.prometheus import Exposition
from edgert_deploy.fleet.export.scrape import scrape_server
from edgert_deploy.fleet.ui.access import Access
from edgert_deploy.fleet.ui.answers import Answers
from edgert_deploy.fleet.ui.live_views import LiveViews
from edgert_deploy.fleet.ui.rollouts import Rollouts
from edgert_deploy.fleet.ui.server import PageServer
from edgert_deploy.fleet.web import WebServer
from edgert_deploy.rollout.rollout_store import RolloutStore
from tests.support.devices import WAIT_S_MAX, a_device, http_port, wait_until
from tests.support.fleet import NOW_MS, Watched
from tests.support.http_requests import binary_body, json_input

GOOD_REQUESTS = 60
ANEW_MAX = 10

# Holds argv[2] connections to the port argv[1]. Each connection sends the first argv[4] bytes of stdin within argv[3]
# seconds, then single bytes, and reads nothing. If the server closes a connection, the attacker opens a new one. It
# opens at most a hundred per second, and they send at most 8 MB per second: a client that sends more is not slow. Each
# further byte of stdin announces a good request. Until the next one, the attacker opens at most argv[5] connections: a
# busy machine may halt the good client, and more connections would take its place.
_ATTACK = """
import os, select, socket, sys, time
port, count, wait_s_max, size, anew_max = (int(word) for word in sys.argv[1:])
begins = b""
while len(begins) < size: begins += os.read(0, size - len(begins))
def connect():
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(wait_s_max)
    sock.connect(("127.0.0.1", port))
    try: sock.sendall(begins)
    except OSError: pass  # the server reads no more
    sock.setblocking(False)
    return sock
def is_open(sock):
    try:
        if begins: sock.send(b"a")
        else: return sock.recv(1) != b""
    except BlockingIOError: pass
    except OSError: return False
    return True
anew = 5 if len(begins) < 80_000 else 1
held = [connect() for _ in range(count)]
if anew == 1:  # so many requests at once are no slow clients either: wait until they are answered
    for sock in held: select.select([sock], [], [], wait_s_max)
print("attacks", flush=True)
left = anew_max
while True:
    time.sleep(0.05)
    if select.select([0], [], [], 0)[0] and os.read(0, 65536): left = anew_max
    closed = [number for number, sock in enumerate(held) if not is_open(sock)]
    for number in closed[: min(anew, left)]:
        left -= 1
        held[number].close()
        held[number] = connect()
"""
POST = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"
LARGE, LARGE_HEAD = binary_body(np.zeros((20_000, 4), np.float32))
ATTACKS = {
    "heads": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
    "silence": b"",
    "bodies": POST + b"Content-Length: 900000\r\n\r\n",
    "chunks": POST + b"Transfer-Encoding: chunked\r\n\r\n8fff\r\n",
    "unread answers": POST
    + b"".join(b"%s: %s\r\n" % (k.encode(), v.encode()) for k, v in LARGE_HEAD.items())
    + b"Content-Length: %d\r\n\r\n" % len(LARGE)
    + LARGE,
}


@contextmanager
def attacked(port: int, count: int, begins: bytes) -> Iterator[Callable[..., int]]:
    """Attack during the block; yield a function that sends a good request to the port."""
    numbers = (port, count, int(WAIT_S_MAX), len(begins), ANEW_MAX)
    argv = [sys.executable, "-I", "-c", _ATTACK, *map(str, numbers)]

    def good(method: str, path: str, body: bytes | None = None) -> int:
        assert attacker.stdin is not None
        attacker.stdin.write(b".")
        attacker.stdin.flush()
        return ask(port, method, path, body)

    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
        try:
            assert attacker.stdin is not None
            assert attacker.stdout is not None
            attacker.stdin.write(begins)
            attacker.stdin.flush()
            assert attacker.stdout.readline() == b"attacks\n"
            yield good
            assert attacker.poll() is None, "the attacker gave up"
        finally:
            attacker.kill()


def ask(port: int, method: str, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@pytest.fixture(scope="module")
def device_port() -> Iterator[int]:
    with a_device('[http]\nlisten = "127.0.0.1:0"\n') as device:  # 64 places
        device.put()
        device.put(model="slow", delay_s=0.3)
        yield http_port(device)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("count", [70, 260])
def test_a_device_answers_every_good_request(device_port: int, attack: str, count: int) -> None:
    rows = json.dumps({"inputs": [json_input(np.ones((2, 4), np.float32))]}).encode()
    with attacked(device_port, count, ATTACKS[attack]) as good:
        # On a busy machine, the first requests of the attackers may fill every place for a moment.
        wait_until(lambda: good("GET", "/v2/health/live") == 200, "the first flood is over")
        for _ in range(GOOD_REQUESTS):
            assert good("GET", "/v2/health/live") == 200
            assert good("POST", "/v2/models/echo/infer", rows) == 200
    assert ask(device_port, "GET", "/v2/health/live") == 200


def test_health_is_answered_while_every_inference_that_may_run_runs(device_port: int) -> None:
    rows = json.dumps({"inputs": [json_input(np.ones((2, 4), np.float32))]}).encode()
    request = POST.replace(b"echo", b"slow") + b"Content-Length: %d\r\n\r\n" % len(rows) + rows
    with attacked(device_port, 150, request * 100) as good:
        for _ in range(GOOD_REQUESTS):
            assert good("GET", "/v2/health/live") == 200


def metrics_server(_: Path) -> tuple[WebServer, str]:
    exporter = Exporter("b1", ("site",), wall_clock=lambda: 0.0)
    return scrape_server(Exposition(exporter), "127.0.0.1", 0), "/metrics"


def page_server(folder: Path) -> tuple[PageServer, str]:
    live_views = LiveViews(Watched(), Rollouts(RolloutStore(folder / "none")), lambda: 1000.0, lambda: NOW_MS)
    answers = Answers(live_views, None)  # type: ignore[arg-type]  # no page asks for the history here
    return PageServer(answers, Access(frozenset()), "127.0.0.1", 0), "/api/v1/devices"


@pytest.mark.parametrize("attack", ["heads", "silence"])
@pytest.mark.parametrize("served", [metrics_server, page_server])
def test_the_fleet_s_servers_answer_every_good_request(
    served: Callable[[Path], tuple[WebServer | PageServer, str]], attack: str, tmp_path: Path
) -> None:
    server, path = served(tmp_path)
    with attacked(server.port, 400, ATTACKS[attack]) as good:  # 256 places
        for _ in range(GOOD_REQUESTS):
            assert good("GET", path) == 200
    server.close()


def test_an_open_page_stays_connected(tmp_path: Path) -> None:
    server, _ = page_server(tmp_path)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/api/v1/live")
    stream = connection.getresponse()
    assert stream.readline() == b"retry: 2000\n"
    with attacked(server.port, 400, ATTACKS["heads"]) as good:
        for _ in range(GOOD_REQUESTS):
            assert good("GET", "/api/v1/devices") == 200
    assert stream.readline() == b"event: fleet\n"
    connection.close()
    server.close()
