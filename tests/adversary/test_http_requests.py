"""Requests that are nearly HTTP or JSON, and requests that a browser sends for a page of another site."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.support.devices import a_device, http_port
from tests.support.http_requests import Answer, binary_body, json_input, read_answer, sent

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
BODY = json.dumps({"inputs": [json_input(ROWS)]}).encode()
PATH = "/v2/models/echo/infer"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with a_device('[http]\nlisten = "127.0.0.1:0"\n') as device:
        device.put()
        yield http_port(device)


def ask(port: int, *lines: str, start: str = f"POST {PATH} HTTP/1.1", body: bytes = BODY, host: bool = True) -> Answer:
    """Send a request with exactly these lines and this body."""
    head = [start, *(["Host: localhost"] if host else []), *lines]
    if not any(line.startswith("Transfer-Encoding") for line in lines):
        head.append(f"Content-Length: {len(body)}")
    with sent(port, "\r\n".join(head).encode() + b"\r\n\r\n" + body) as file:
        return read_answer(file)


def strict(body: bytes) -> Any:
    """Parse JSON that every reader accepts: it has no NaN and no Infinity."""

    def refused(name: str) -> NoReturn:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(body, parse_constant=refused)


def test_a_good_request_is_answered(port: int) -> None:
    assert ask(port).json["outputs"][0]["data"] == ROWS.ravel().tolist()


@pytest.mark.parametrize("shape", [[0, 2**62], [2**62, 0], [0, 2**33], [0, 2**31, 2**31], [2**63, 4], [0] * 9])
@pytest.mark.parametrize("binary", [False, True])
def test_a_shape_that_no_array_can_have_is_refused(port: int, shape: list[int], binary: bool) -> None:
    entry: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": shape}
    entry["parameters" if binary else "data"] = {"binary_data_size": 0} if binary else []
    assert ask(port, body=json.dumps({"inputs": [entry]}).encode()).status == 400


@pytest.mark.parametrize("shape", [[0], [0, 4], [0, 0], [4, 0]])
def test_an_empty_array_is_answered_or_refused(port: int, shape: list[int]) -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": shape, "data": []}
    assert ask(port, body=json.dumps({"inputs": [entry]}).encode()).status in (200, 400)


def test_an_answer_with_values_that_json_does_not_have_is_valid_json(port: int) -> None:
    odd = np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32)
    body, said = binary_body(odd)
    length = int(said["Inference-Header-Content-Length"])
    text = json.dumps(json.loads(body[:length]) | {"parameters": {}}).encode()
    answer = ask(port, f"Inference-Header-Content-Length: {len(text)}", body=text + body[length:])
    assert answer.status == 200
    assert strict(answer.body)["outputs"][0]["data"] == [None, None, None, 1.5]
    exact = ask(port, f"Inference-Header-Content-Length: {length}", body=body)
    assert exact.body.endswith(odd.tobytes())


@pytest.mark.parametrize(
    ("lines", "start", "status"),
    [
        (["Host: localhost"], None, 400),
        (["Host: evil.example"], None, 400),
        (["host:evil.example"], None, 400),
        (["Host: localhost, evil.example"], None, 400),
        (["Transfer-Encoding: chunked"], f"POST {PATH} HTTP/1.0", 400),
        (["Transfer-Encoding: chunked", "Connection: keep-alive"], f"POST {PATH} HTTP/1.0", 400),
        (["Transfer-Encoding: gzip, chunked"], None, 400),
        (["Transfer-Encoding: chunked, identity"], None, 400),
        (["Transfer-Encoding: xchunked"], None, 400),
        (["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], None, 400),
        (["Transfer-Encoding: chunked", "Content-Length: 5"], None, 400),
        (["Content-Length: 5"], None, 400),
        (["Content-Length: +5"], None, 400),
        (["Host : localhost"], None, 400),
        ([" Host: localhost"], None, 400),
        (["Inference-Header-Content-Length: 5"] * 2, None, 400),
        ([], f"POST {PATH} HTTP/0.9", 400),
        ([], f"POST {PATH} HTTP/2.0", 400),
        ([], f"POST {PATH} HTTP/1.10", 400),
        ([], f"POST {PATH}", 400),
    ],
)
def test_a_request_that_servers_read_in_different_ways_is_refused(
    port: int, lines: list[str], start: str | None, status: int
) -> None:
    answer = ask(port, *lines, start=start or f"POST {PATH} HTTP/1.1")
    assert (answer.status, bool(answer.json["error"])) == (status, True)


def test_http_1_1_without_a_host_is_refused_and_http_1_0_without_a_host_is_answered(port: int) -> None:
    assert ask(port, "Connection: close", host=False).status == 400
    assert ask(port, host=False, start=f"POST {PATH} HTTP/1.0").status == 200


CROSS_SITE = [
    ["Sec-Fetch-Site: cross-site"],
    ["Sec-Fetch-Site: same-site"],
    ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"],  # the user sent a form
    ["Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: cross-site"],
    ["Origin: https://evil.example"],
    ["Origin: null"],
    ["Origin: http://localhost:3000"],
]


@pytest.mark.parametrize("lines", CROSS_SITE, ids=", ".join)
@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/x-www-form-urlencoded", ""])
def test_a_page_of_another_site_runs_no_inference(port: int, lines: list[str], kind: str) -> None:
    assert ask(port, *lines, *([f"Content-Type: {kind}"] if kind else [])).status == 403


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;charset=UTF-8", "Text/Plain", "multipart/form-data; boundary=x"]
)
def test_the_content_types_of_forms_are_refused(port: int, kind: str) -> None:
    answer = ask(port, f"Content-Type: {kind}")
    assert answer.status == 415
    assert "application/json" in answer.json["error"]


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Type: application/x-www-form-urlencoded"],  # from curl: no browser has marked the request
        ["Content-Type: application/json", "Sec-Fetch-Site: none"],
        ["Origin: http://localhost", "Sec-Fetch-Site: same-origin"],
    ],
    ids=", ".join,
)
def test_requests_of_tools_and_requests_that_the_user_starts_are_answered(port: int, lines: list[str]) -> None:
    assert ask(port, *lines).status == 200


def test_a_browser_may_follow_a_link_of_another_site(port: int) -> None:
    lines = ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"]
    assert ask(port, *lines, start="GET /v2 HTTP/1.1", body=b"").status == 200
    assert ask(port, *lines[:1], start="GET /metrics HTTP/1.1", body=b"").status == 403
