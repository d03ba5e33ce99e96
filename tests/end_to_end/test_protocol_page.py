"""docs/protocol.md describes the behaviour of a real daemon, and the program on this page runs unchanged."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from edgert.protocol import wire
from tests.support.clients import HELLO, ITEM, raw, read_frame, request
from tests.support.devices import WAIT_S_MAX, Device, a_device
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/protocol.md").read_text()


@pytest.fixture(scope="module")
def serving() -> Iterator[Device]:
    with a_device() as device:
        device.deploy()
        yield device


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # the kernel drops the bytes that the daemon had not read
        return True


@pytest.mark.parametrize("model", ["echo", "nope"])
def test_the_program_on_the_page_gets_an_answer_of_the_daemon(serving: Device, model: str) -> None:
    call = '"digits", 11, [1, 1, 8, 8], struct.pack("<64f", *[0.5] * 64)'
    program = block("python")
    assert call in program
    program = program.replace(call, f'"{model}", 11, [1, 4], struct.pack("<4f", 1, 2, 3, 4)')
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        env={**os.environ, "EDGERT_SOCKET": os.fspath(serving.socket)},
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
    )
    if model == "echo":
        assert done.stdout == f"{ {'y': ([1, 4], ITEM.tobytes())} }\n", done.stderr
    else:
        assert "request.model_not_found: unknown model 'nope'" in done.stderr


def test_the_description_of_a_model_has_the_members_that_the_page_lists(serving: Device) -> None:
    described = json.loads(block("json"))
    with raw(serving) as sock:
        sock.sendall(HELLO)
        frame = read_frame(sock)
    assert frame.kind == wire.WELCOME
    welcome = frame.json()
    assert welcome.keys() == described.keys() - {"preprocess", "labels"}
    assert welcome["inputs"][0].keys() == described["inputs"][0].keys()


def test_the_list_of_models_has_the_members_that_the_page_lists(serving: Device) -> None:
    (example,) = re.findall(r'`(\{"edgert": .*?\]\})`', PAGE)
    with raw(serving) as sock:
        sock.sendall(wire.json_frame(wire.HELLO, {"model": None}))
        listed = read_frame(sock).json()
        assert ended(sock)
    assert listed.keys() == json.loads(example).keys()
    assert listed["models"][0].keys() == json.loads(example)["models"][0].keys()


def test_an_error_after_a_hello_ends_the_connection(serving: Device) -> None:
    with raw(serving) as sock:
        sock.sendall(wire.json_frame(wire.HELLO, {"model": "nope"}))
        frame = read_frame(sock)
        assert (frame.kind, frame.request_id) == (wire.ERROR, 0)
        assert ended(sock)


def test_fields_that_a_kind_does_not_use_are_ignored(serving: Device) -> None:
    odd = bytearray(request(7))
    odd[30] = odd[40] = 1  # status and a stage time
    odd[64 + 3] = odd[64 + 50] = odd[64 + 16 + 4 * 7] = 1  # reserved bytes, and a dimension beyond the rank
    with raw(serving) as sock:
        sock.sendall(HELLO + bytes(odd))
        assert read_frame(sock).kind == wire.WELCOME
        frame = read_frame(sock)
    assert (frame.kind, frame.request_id) == (wire.RESULT, 7)


def test_a_ping_is_answered_with_its_id_and_without_metadata(serving: Device) -> None:
    with raw(serving) as sock:
        sock.sendall(HELLO + b"".join(wire.frame(wire.PING, request_id=77)) + request(78))
        frames = [read_frame(sock) for _ in range(3)]
    assert [(frame.kind, frame.request_id) for frame in frames] == [
        (wire.WELCOME, 0),
        (wire.PONG, 77),
        (wire.RESULT, 78),
    ]
