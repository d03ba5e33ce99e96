"""Frames are read from the bytes of a connection unchanged, and false frames cost no memory."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgert.errors import Overloaded, ProtocolError
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.tensors import NUMPY_NAMES
from tests.support.frames import complete, infer_frame


def feed(frames: FrameBuffer, data: bytes, chunk: int) -> list[tuple[int, int, list[NDArray[Any]]]]:
    """Return every frame of `data`, given `chunk` bytes at a time: kind, request id, arrays."""
    found = []
    at = 0
    while at < len(data):
        room = frames.room
        count = min(chunk, len(room), len(data) - at)
        room[:count] = data[at : at + count]
        at += count
        frame = frames.feed(count)
        while frame is not None:
            arrays = [np.frombuffer(t.data, NUMPY_NAMES[t.datatype]).reshape(t.shape).copy() for t in frame.tensors]
            found.append((frame.kind, frame.request_id, arrays))
            frame = frames.feed(0) if frames.more else None
    return found


shapes = st.lists(st.integers(0, 5), max_size=8).map(tuple)
datatypes = st.sampled_from([name for name in NUMPY_NAMES if name != "FP16"])


@settings(deadline=None)
@given(
    tensors=st.lists(st.tuples(datatypes, shapes), max_size=4),
    meta=st.binary(max_size=200),
    chunk=st.integers(1, 3000),
)
def test_frames_are_read_unchanged_however_their_bytes_are_cut(
    tensors: list[tuple[str, tuple[int, ...]]], meta: bytes, chunk: int
) -> None:
    arrays = [np.arange(np.prod(shape)).reshape(shape).astype(NUMPY_NAMES[name]) for name, shape in tensors]
    data = infer_frame(*arrays, meta=meta) + wire.json_frame(wire.PING, {"n": 1}, request_id=8)
    first, second = feed(FrameBuffer(), data, chunk)
    assert first[:2] == (wire.INFER, 7)
    assert second[:2] == (wire.PING, 8)
    assert len(first[2]) == len(arrays)
    for got, sent in zip(first[2], arrays, strict=True):
        assert got.dtype == sent.dtype
        np.testing.assert_array_equal(got, sent)


def test_tensors_are_aligned_and_a_frame_of_the_same_form_reuses_the_tensor_objects() -> None:
    frames = FrameBuffer()
    seen = []
    for value in (1.0, 2.0):
        data = infer_frame(np.full((1, 3, 5), value, np.float32))
        frames.room[: len(data)] = data
        frame = frames.feed(len(data))
        assert frame is not None
        array = np.frombuffer(frame.tensors[0].data, np.float32)
        assert array.ctypes.data % wire.ALIGNMENT == 0
        assert set(array.tolist()) == {value}
        seen.append(frame.tensors)
    assert seen[0] is seen[1]


HEADER_FIELDS = [
    "magic",
    "version",
    "kind",
    "flags",
    "request_id",
    "model_id",
    "arg",
    "meta_bytes",
    "tensors",
    "status",
    "body",
]


def with_header(data: bytes, **changes: Any) -> bytes:
    values = list(wire.HEADER.unpack_from(data))
    for name, value in changes.items():
        values[HEADER_FIELDS.index(name)] = value
    return wire.HEADER.pack(*values) + data[64:]


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"HTTP"},
        {"version": 2},
        {"kind": 0},
        {"kind": 99},
        {"body": 2**63},
        {"body": wire.FRAME_BYTES_MAX},
        {"meta_bytes": 2**32 - 1},
        {"tensors": 65535},
        {"tensors": 2},
        {"tensors": 0},
        {"meta_bytes": 100},
        {"body": 192},
    ],
    ids=str,
)
def test_a_header_with_a_false_value_is_refused(changes: dict[str, Any]) -> None:
    data = with_header(infer_frame(np.zeros(16, np.float32)), **changes) + bytes(64)
    with pytest.raises(ProtocolError):
        complete(data)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(65, 200), (66, 9), (72, 0), (72, 2**40), (80, 2**32 - 1)],
    ids=["datatype", "rank", "no-bytes", "many-bytes", "dimension"],
)
def test_a_descriptor_with_a_false_value_is_refused(offset: int, value: int) -> None:
    data = bytearray(infer_frame(np.zeros((2, 8), np.float32)))
    size = {65: "B", 66: "B", 72: "<Q", 80: "<I"}[offset]
    struct.pack_into(size, data, offset, value)
    with pytest.raises(ProtocolError):
        complete(bytes(data))


@given(st.binary(min_size=1, max_size=400), st.integers(0, 300))
def test_a_frame_with_noise_is_refused_or_incomplete_and_never_a_crash(noise: bytes, at: int) -> None:
    data = bytearray(infer_frame(np.arange(20, dtype=np.int32), meta=b'{"a":1}'))
    data[at : at + len(noise)] = noise
    with contextlib.suppress(ProtocolError):
        complete(bytes(data), frame_bytes_max=10_000)


def test_a_frame_beyond_the_limit_is_refused_before_memory_is_allocated() -> None:
    frames = FrameBuffer(frame_bytes_max=4096, size_bytes=128)
    data = infer_frame(np.zeros(2000, np.float32))[:64]
    frames.room[:64] = data
    with pytest.raises(ProtocolError, match="4096"):
        frames.feed(64)


def test_the_buffer_knows_the_missing_bytes_of_a_frame_and_releases_memory_only_between_frames() -> None:
    sizes: list[tuple[int, int]] = []
    frames = FrameBuffer(size_bytes=128, resizing=lambda old, new: sizes.append((old, new)))
    data = infer_frame(np.zeros(2000, np.float32))
    missing = [frames.missing()]
    for begin, end in ((0, 60), (60, 64), (64, 1000)):
        frames.room[: end - begin] = data[begin:end]
        assert frames.feed(end - begin) is None
        missing.append(frames.missing())
    assert missing == [0, 4, len(data) - 64, len(data) - 1000]
    frames.shrink()  # a frame has begun
    assert frames.size_bytes >= len(data)
    frames.room[: len(data) - 1000] = data[1000:]
    assert frames.feed(len(data) - 1000) is not None
    assert frames.missing() == 0
    large = frames.size_bytes
    frames.shrink()
    assert sizes == [(128, large), (large, 128)]


def test_memory_that_is_refused_leaves_the_frame_unread() -> None:
    def refuse(old: int, new: int) -> None:
        raise Overloaded("no memory for large frames")

    frames = FrameBuffer(size_bytes=128, resizing=refuse)
    frames.room[:64] = infer_frame(np.zeros(2000, np.float32))[:64]
    with pytest.raises(Overloaded):
        frames.feed(64)
    assert frames.size_bytes == 128


def test_a_smaller_limit_also_holds_for_a_frame_of_the_same_form_as_the_last() -> None:
    frames = FrameBuffer()
    data = infer_frame(np.zeros(16, np.float32))
    frames.room[: len(data)] = data
    assert frames.feed(len(data)) is not None
    frames.limit(len(data) - 1)
    frames.room[: len(data)] = data
    with pytest.raises(ProtocolError, match=f"at most {len(data) - 1} are allowed"):
        frames.feed(len(data))


@pytest.mark.parametrize("flags", [wire.FLAG_SHARED, 0])
def test_a_frame_is_read_from_the_way_that_it_came_although_the_last_came_another_way(flags: int) -> None:
    """A sender may use shared memory for one frame and the socket for the next frame."""
    frames = FrameBuffer()
    ones, twos = (infer_frame(np.full(16, value, np.float32)) for value in (1, 2))
    frames.shared = memoryview(bytearray(ones))
    for way in (flags, wire.FLAG_SHARED - flags, flags):
        data = with_header(twos, flags=way)[: 64 if way else len(twos)]
        frames.room[: len(data)] = data
        frame = frames.feed(len(data))
        assert frame is not None
        assert set(np.frombuffer(frame.tensors[0].data, np.float32)) == {1.0 if way else 2.0}
