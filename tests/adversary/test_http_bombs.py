"""Small requests that try to make a server allocate much memory.

The memory grows only with the received bytes, and the health check is answered.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import Device, a_device, http_pid, http_port

FRAME_BYTES = 8 * 1024**2
CONFIG = """
[serving]
frame_mb = 8
[http]
listen = "127.0.0.1:0"
"""
GROWTH_BYTES_MAX = 100 * 1024**2  # for JSON of 4 MB as Python objects (one at a time), two bodies, and threads
ATTACKERS = 4
CHECKS = 10
HEAD = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"


@dataclass
class Server:
    device: Device
    port: int
    pid: int

    def begin_measuring(self) -> int:
        """Return the resident bytes, and reset the peak."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        return self._status("VmHWM")

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with a_device(CONFIG) as device:
        device.put()
        port = http_port(device)
        pid = http_pid(device)
        assert pid is not None
        yield Server(device, port, pid)


def tensor(data: Any, shape: list[int], datatype: str = "FP32") -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}]}).encode()


def files(lengths: list[int]) -> tuple[bytes, int]:
    """Return a BYTES tensor of files, and the length of its JSON."""
    data = b"".join(length.to_bytes(4, "little") + bytes(length) for length in lengths)
    entry = {"name": "x", "datatype": "BYTES", "shape": [len(lengths)], "parameters": {"binary_data_size": len(data)}}
    text = json.dumps({"inputs": [entry]}).encode()
    return text + data, len(text)


BOMBS: dict[str, bytes] = {
    "one long string": tensor(["x" * 20_000, *[""] * 30_000], [1, 30_001]),
    "one long string in short JSON": tensor(["x" * 4_000, *[""] * 2_900], [1, 2_901]),
    "a long string in rows": tensor([["x" * 20_000, ""]] + [["", ""]] * 15_000, [15_001, 2]),
    "a long string among numbers": tensor([1.5, "x" * 20_000] + [1] * 40_000, [1, 40_002]),
    "text in place of integers": tensor(["x" * 20_000] + [1] * 30_000, [1, 30_001], "INT64"),
    "lists without end": tensor([[]] * 900_000, [900_000, 0]),
    "objects": tensor([{}] * 900_000, [900_000]),
    "a huge axis": tensor([], [0, 2**62]),
    "huge axes": tensor([], [0, 2**31, 2**31]),
    "a shape of much": tensor([1], [2**20, 2**20, 2**20]),
    "a number of many digits": tensor([0], [1]).replace(b"[0]", b"[" + b"9" * 4_000_000 + b"]"),
}


def post(server: Server, body: bytes, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", "/v2/models/echo/infer", body, headers)
        answer = connection.getresponse()
        assert answer.read()
        return answer.status
    finally:
        connection.close()


@contextmanager
def attacked(server: Server, attack: Callable[[], None]) -> Iterator[None]:
    """Attack from several threads during the block.

    Then check that the server's memory grew by less than GROWTH_BYTES_MAX.
    """
    stop, ended = threading.Event(), list[str]()

    def again_and_again() -> None:
        try:
            while not stop.is_set():
                with suppress(ConnectionError):  # the server gives the place of the attacker to another client
                    attack()
        except Exception as error:  # noqa: BLE001  # the test reports it
            ended.append(repr(error))

    before_bytes = server.begin_measuring()
    threads = [threading.Thread(target=again_and_again) for _ in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(300)
    assert ended == []
    assert server.peak_bytes - before_bytes < GROWTH_BYTES_MAX


def answers_health(server: Server) -> None:
    for _ in range(CHECKS):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200
        connection.close()


def refused(status: int) -> None:
    assert status in (400, 413, 431, 503), status


@pytest.mark.parametrize("name", BOMBS)
def test_json_that_claims_more_than_it_holds_is_refused(server: Server, name: str) -> None:
    assert post(server, BOMBS[name]) == 400
    with attacked(server, lambda: refused(post(server, BOMBS[name]))):
        answers_health(server)


@pytest.mark.parametrize("lengths", [[1_000_000] + [1] * 250, [FRAME_BYTES - 100_000] + [0] * 30])
def test_files_of_which_one_is_long_are_refused(server: Server, lengths: list[int]) -> None:
    body, text_bytes = files(lengths)
    said = {"Inference-Header-Content-Length": str(text_bytes)}
    assert post(server, body, **said) == 400
    with attacked(server, lambda: refused(post(server, body, **said))):
        answers_health(server)


def test_a_body_that_unpacks_to_too_many_bytes_is_refused(server: Server) -> None:
    bomb = gzip.compress(bytes(20 * FRAME_BYTES))
    with attacked(server, lambda: refused(post(server, bomb, **{"Content-Encoding": "gzip"}))):
        answers_health(server)


def test_a_body_in_many_short_chunks_does_not_delay_the_answer_about_health(server: Server) -> None:
    chunks = b"2\r\nab\r\n" * 65_536

    def attack() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(FRAME_BYTES // 2 // 65_536):
                sock.sendall(chunks)

    with attacked(server, attack):
        answers_health(server)


def test_lengths_that_are_only_stated_take_no_memory_from_good_requests(server: Server) -> None:
    _, text_bytes = files([16])
    head = HEAD + b"Inference-Header-Content-Length: %d\r\n" % text_bytes
    with attacked(server, lambda: None):
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(40)]
        for sock in held:
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % FRAME_BYTES)
        for _ in range(CHECKS):  # a good body still fits into the memory
            assert post(server, tensor([1.0, 2.0, 3.0, 4.0] * 20_000, [20_000, 4])) in (200, 400)
        answers_health(server)
        for sock in held:
            sock.close()


@pytest.mark.parametrize(
    "begins",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX",
        b"GET /",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;x=",
        b"\r\n" * 100,
    ],
    ids=["field", "name", "address", "trailer", "extension", "blank lines"],
)
def test_endless_heads_and_endless_fields_need_little_memory(server: Server, begins: bytes) -> None:
    filler = (b"\r\n" if begins.endswith(b"\r\n\r\n") else b"aa") * 32_768

    def attack() -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            sock.sendall(begins)
            for _ in range(2_000):  # 128 MB, if the server accepts all of it
                sock.sendall(filler)
            raise AssertionError("the server took all of it")

    with attacked(server, attack):
        answers_health(server)
