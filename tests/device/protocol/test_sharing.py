"""Memory shared between an app and the daemon: the same answers as through the socket, and no misuse."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert import Client
from edgert.errors import RequestError
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.protocol.sharing import SharedArea, receive_with_descriptor
from tests.support.devices import WAIT_S_MAX, Device, a_device

SIDE = 200  # 160 KB an item, well above SHARE_BYTES_MIN


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device() as device:
        device.put(item_shape=(SIDE, SIDE))
        yield device


def image(value: float, rows: int = 1) -> NDArray[np.float32]:
    return (np.random.default_rng(int(value)).random((rows, SIDE, SIDE), dtype=np.float32) + value).astype(np.float32)


@pytest.mark.parametrize("transport", ["auto", "socket"])
def test_large_tensors_arrive_whole_over_either_transport(device: Device, transport: str) -> None:
    with Client(device.socket, transport=transport) as client:
        for value, rows in ((1, 1), (2, 1), (3, 4), (4, 1), (5, 13), (6, 60), (7, 1)):
            sent = image(value, rows)
            np.testing.assert_array_equal(client.infer("echo", sent, cache=False)["y"], sent)
        single = image(8)[0]
        np.testing.assert_array_equal(client.infer("echo", single)["y"], single)


def test_an_answer_does_not_change_with_the_next_request(device: Device) -> None:
    with Client(device.socket) as client:
        first = client.infer("echo", image(1), cache=False)["y"]
        kept = first.copy()
        client.infer("echo", image(2), cache=False)
        np.testing.assert_array_equal(first, kept)


def test_arrays_that_are_not_contiguous_are_accepted(device: Device) -> None:
    with Client(device.socket) as client:
        client.infer("echo", image(1))
        turned = image(3).transpose(0, 2, 1)
        np.testing.assert_array_equal(client.infer("echo", turned)["y"], turned)
        every_second = np.repeat(image(4), 2, axis=0)[::2]
        np.testing.assert_array_equal(client.infer("echo", every_second)["y"], every_second)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(RequestError, match="auto, socket"):
        Client("/nowhere", transport="pigeon")


def connect(device: Device, shared: bool = True) -> tuple[socket.socket, int | None]:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S_MAX)
    sock.connect(os.fspath(device.socket))
    sock.sendall(wire.json_frame(wire.HELLO, {"model": "echo", "shared": shared}))
    room = memoryview(bytearray(8192))
    _, descriptor = receive_with_descriptor(sock, room)
    return sock, descriptor


def test_a_client_cannot_resize_the_shared_memory_of_the_daemon(device: Device) -> None:
    sock, descriptor = connect(device)
    assert descriptor is not None
    with sock:
        for size in (0, 4096, 10**9):
            with pytest.raises(OSError):
                os.ftruncate(descriptor, size)
        with pytest.raises(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        os.close(descriptor)


def test_a_client_that_does_not_ask_gets_no_shared_memory(device: Device) -> None:
    sock, descriptor = connect(device, shared=False)
    with sock:
        assert descriptor is None


@pytest.mark.parametrize("body_bytes", [2**20 * 60, 2**63 - 64, 64])
def test_a_false_header_about_shared_memory_ends_only_the_connection(device: Device, body_bytes: int) -> None:
    sock, descriptor = connect(device)
    assert descriptor is not None
    with sock:
        header = wire.HEADER.pack(
            wire.MAGIC, wire.VERSION, wire.INFER, wire.FLAG_SHARED, 1, 0, 0, 0, 1, 0, body_bytes, *(0,) * 6
        )
        sock.sendall(header)
        answer = sock.recv(8192)
        assert answer[5] == wire.ERROR
    os.close(descriptor)
    with Client(device.socket) as client:
        assert client.infer("echo", image(1))["y"].shape == (1, SIDE, SIDE)


def test_the_use_of_shared_memory_without_a_request_for_it_is_a_protocol_error(device: Device) -> None:
    sock, _ = connect(device, shared=False)
    with sock:
        sock.sendall(
            wire.HEADER.pack(wire.MAGIC, wire.VERSION, wire.INFER, wire.FLAG_SHARED, 1, 0, 0, 0, 1, 0, 128, *(0,) * 6)
        )
        assert sock.recv(8192)[5] == wire.ERROR


def test_the_daemon_computes_on_its_own_copy(device: Device) -> None:
    """A client cannot change a request in progress: the daemon reads the descriptor from its copy."""
    made = SharedArea.create(2**20)
    assert made is not None
    area, descriptor = made
    os.close(descriptor)
    frames = FrameBuffer()
    frames.shared = area.request
    array = image(1)
    tensor = wire.OutTensor(wire.descriptor(0, "FP32", array.shape, array.nbytes), array.tobytes())
    header = wire.share(wire.frame(wire.INFER, tensors=[tensor]), area.request)
    assert header is not None
    frames.room[:64] = header
    frame = frames.feed(64)
    assert frame is not None
    area.request[64 : 64 + array.nbytes] = bytes(array.nbytes)
    assert frame.tensors[0].data == array.tobytes()


def test_a_frame_that_follows_an_answer_in_shared_memory_is_not_lost() -> None:
    """A replaced worker sends MOVED right after its last answer, so both frames may arrive at once."""
    area = memoryview(bytearray(2**20))
    frames = FrameBuffer(size_bytes=4096)
    frames.shared = area
    moved = wire.json_frame(wire.MOVED, {})
    for value in (1, 2):
        array = image(value)
        tensor = wire.OutTensor(wire.descriptor(0, "FP32", array.shape, array.nbytes), array.tobytes())
        header = wire.share(wire.frame(wire.RESULT, tensors=[tensor]), area)
        assert header is not None
        came = header + moved
        frames.room[: len(came)] = came
        answer = frames.feed(len(came))
        assert answer is not None
        assert (answer.kind, frames.more) == (wire.RESULT, len(moved))
        assert answer.tensors[0].data == array.tobytes()
        after = frames.feed(0)
        assert after is not None
        assert (after.kind, frames.more) == (wire.MOVED, 0)


def test_shared_memory_that_is_not_sealed_is_not_used() -> None:
    descriptor = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
    assert SharedArea.open(descriptor) is None
    reader, writer = os.pipe()
    os.close(writer)
    assert SharedArea.open(reader) is None
