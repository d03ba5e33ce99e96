"""Answers as bytes, and the daemon's errors as answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from edgert.errors import (
    BundleCorrupt,
    DeadlineExceeded,
    EdgeRTError,
    ModelNotFound,
    NotAllowed,
    Overloaded,
    ProtocolError,
    WorkerLost,
)
from edgert.http.messages import HttpError, HttpRequest, HttpResponse


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (ModelNotFound("x"), 404, None),
        (NotAllowed("x"), 403, None),
        (DeadlineExceeded("x"), 504, None),
        (ProtocolError("x"), 400, None),
        (BundleCorrupt("x"), 500, None),
        (Overloaded("x", retry_after_s=0.02), 503, "1"),
        (Overloaded("x", retry_after_s=2.1), 503, "3"),
        (WorkerLost("x"), 503, "1"),
    ],
    ids=str,
)
def test_each_error_of_the_daemon_has_its_status(error: EdgeRTError, status: int, retry_after: str | None) -> None:
    answer = HttpError.of(error).response()
    assert (answer.status, dict(answer.headers).get("Retry-After")) == (status, retry_after)
    assert json.loads(bytes(answer.parts[0])) == {"error": "x"}


def test_the_head_states_the_length_unless_the_answer_has_no_body() -> None:
    def endless() -> Iterator[bytes]:
        yield b"x"

    plain = HttpResponse(200, (b"abc", memoryview(b"de"))).head(keep_alive=True)
    assert plain.startswith(b"HTTP/1.1 200 OK\r\nDate: ")
    assert b"\r\nContent-Length: 5\r\n" in plain
    assert b"Connection:" not in plain
    assert plain.endswith(b"\r\n\r\n")
    for unsized in (HttpResponse(304), HttpResponse(200, stream=endless())):  # type: ignore[arg-type]
        assert b"Content-Length" not in unsized.head(keep_alive=True)
    closing = HttpError(405, "no", allow="GET", closes=True).response()
    assert closing.closes
    assert b"\r\nAllow: GET\r\nConnection: close\r\n\r\n" in closing.head(keep_alive=False)


def test_the_path_is_decoded_and_ends_before_the_query() -> None:
    assert HttpRequest("GET", "/v2/models/a%2Fb?x=%3F", {}, memoryview(b"")).path == "/v2/models/a/b"


@pytest.mark.parametrize("target", ["http://device:8080/v2/health/live", "HTTP://[::1]/v2/health/live?x=/y"])
def test_the_path_of_an_absolute_target_is_the_part_behind_the_host(target: str) -> None:
    assert HttpRequest("GET", target, {}, memoryview(b"")).path == "/v2/health/live"
