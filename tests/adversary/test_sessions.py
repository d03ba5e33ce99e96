"""Clients that open many sessions and keep them, and frames that claim the memory of another session."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.protocol import wire
from edgert.protocol.arrays import to_wire
from tests.support.clients import raw, read_frame, request
from tests.support.devices import Device, a_device, wait_until

HELLO = wire.json_frame(wire.HELLO, {"model": "sums", "session": True})
STATE = np.full((1, 4), 10, np.float32)
NOTHING = np.zeros(0, np.float32)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device("[serving]\nsession_mb = 0.02\n") as device:
        device.put(model="sums", op="add", state_id="v1")
        device.put(model="wide", op="add", state_id="v1", item_shape=(1000,))
        yield device


@contextlib.contextmanager
def a_session(device: Device) -> Iterator[socket.socket]:
    with raw(device) as sock:
        sock.sendall(HELLO)
        assert read_frame(sock).kind == wire.WELCOME
        yield sock


def resume(*arrays: NDArray[Any], **value: Any) -> bytes:
    meta = wire.json_meta({"release": 1, "version": "", "state_id": "v1", "skip": 0, **value})
    return b"".join(wire.frame(wire.RESUME, meta=meta, tensors=[to_wire(i, one) for i, one in enumerate(arrays)]))


def first_sum(sock: socket.socket) -> float:
    """Return the first value of the answer to the item 1, 2, 3, 4."""
    sock.sendall(request(1))
    frame = read_frame(sock)
    assert frame.kind == wire.RESULT, wire.error_of(frame).message
    return float(np.frombuffer(frame.tensors[0].data, np.float32)[0])


def test_a_thousand_idle_sessions_meet_a_named_limit_and_do_not_disturb_the_others(device: Device) -> None:
    with device.client() as client, contextlib.ExitStack() as held:
        refusals = set()
        for _ in range(1000):
            sock = held.enter_context(raw(device))
            sock.sendall(HELLO)
            if (frame := read_frame(sock)).kind == wire.ERROR:
                refusals.add(wire.error_of(frame).message)
                sock.close()
        assert len(refusals) == 1
        assert "256 sessions, the limit ([serving] sessions_max)" in refusals.pop()
        serving = device.serving("sums")
        assert (serving["sessions"], serving["session_bytes"]) == (256, 256 * 16)
        assert client.infer("sums", STATE[0])["y"].tolist() == [10] * 4
    wait_until(lambda: device.serving("sums")["sessions"] == 0, "all sessions have ended")


def test_the_memory_of_all_sessions_has_a_named_limit(device: Device) -> None:
    with contextlib.ExitStack() as held:
        kinds = []
        for _ in range(8):  # of 4 KB each
            sock = held.enter_context(raw(device))
            sock.sendall(wire.json_frame(wire.HELLO, {"model": "wide", "session": True}))
            frame = read_frame(sock)
            kinds.append(frame.kind)
        assert kinds == [wire.WELCOME] * 5 + [wire.ERROR] * 3
        assert "0.02 MB are the limit ([serving] session_mb)" in wire.error_of(frame).message


def test_a_memory_that_a_client_brings_changes_only_its_own_session(device: Device) -> None:
    with a_session(device) as one, a_session(device) as other:
        one.sendall(resume(STATE, NOTHING))
        assert first_sum(one) == 11
        assert first_sum(other) == 1
        one.sendall(resume(np.full((1, 4), np.nan, np.float32), NOTHING))
        assert np.isnan(first_sum(one))
        assert first_sum(other) == 2


@pytest.mark.parametrize(
    "frame",
    [
        resume(),
        resume(STATE),
        resume(STATE, NOTHING, NOTHING),
        resume(NOTHING, STATE),
        resume(np.zeros((2, 4), np.float32), NOTHING),
        resume(np.zeros((1, 5), np.float32), NOTHING),
        resume(np.zeros((1, 4), np.int32), NOTHING),
        resume(np.zeros(4, np.float32), NOTHING),
        resume(np.array(1, np.float32), NOTHING),
        resume(STATE, np.zeros(1, np.float32)),
        resume(STATE, np.zeros((0, 2), np.float32)),
        resume(STATE, NOTHING, skip=-1),
        resume(STATE, NOTHING, skip=2**60),
        resume(STATE, NOTHING, skip="1"),
        resume(STATE, NOTHING, skip=True),
        b"".join(wire.frame(wire.RESUME, meta=b"[]", tensors=[to_wire(0, STATE), to_wire(1, NOTHING)])),
        b"".join(wire.frame(wire.RESUME, meta=b"{", tensors=[to_wire(0, STATE), to_wire(1, NOTHING)])),
    ],
)
def test_a_memory_of_another_form_ends_the_connection(device: Device, frame: bytes) -> None:
    with a_session(device) as sock:
        sock.sendall(frame)
        answer = read_frame(sock)
        assert (answer.kind, wire.error_of(answer).code) == (wire.ERROR, "request.protocol")
        assert sock.recv(1) == b""
    with a_session(device) as sock:
        assert first_sum(sock) == 1


@pytest.mark.parametrize("value", [{"state_id": "v2"}, {"state_id": ""}, {"state_id": None}, {"state_id": ["v1"]}])
def test_the_memory_of_another_version_is_refused(device: Device, value: dict[str, Any]) -> None:
    with a_session(device) as sock:
        sock.sendall(resume(STATE, NOTHING, **value))
        assert wire.error_of(read_frame(sock)).code == "request.session_lost"
        assert sock.recv(1) == b""


def test_a_connection_without_a_session_refuses_a_memory(device: Device) -> None:
    for hello in ({"model": "sums"}, {"model": "sums", "session": 1}, {"model": "sums", "session": "true"}):
        with raw(device) as sock:
            sock.sendall(wire.json_frame(wire.HELLO, hello))
            assert read_frame(sock).kind == wire.WELCOME
            sock.sendall(resume(STATE, NOTHING))
            assert wire.error_of(read_frame(sock)).code == "request.protocol"
