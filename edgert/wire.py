"""Sans-IO codec of the local protocol (docs/protocol.md): bytes in, frames out; frames in, bytes out.

A frame is a 64-byte header, then `meta` (JSON), then one 64-byte descriptor a tensor, then the tensors'
bytes; each part is padded with zeros to a multiple of 64, so that every tensor lies aligned in the
buffer it was received into and is used where it lies. All numbers are little-endian.

`FrameBuffer` owns the bytes of one connection: write into `writable()`, say `wrote(n)`, ask `next_frame()`.
It never reads a socket, and it needs no NumPy: tensors come out as memoryviews.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from edgert.errors import EdgeRTError, ProtocolError, by_wire_code
from edgert.tensors import MAX_RANK, NUMPY_NAMES, StageTimes

MAGIC = b"ERT1"
VERSION = 1
ALIGNMENT = 64
HELLO_BYTES_MAX = 4096
META_BYTES_MAX = 1024**2
TENSORS_MAX = 32
FRAME_BYTES_MAX = 64 * 1024**2

HELLO, WELCOME, INFER, RESULT, ERROR, PING, PONG, MOVED = range(1, 9)
KINDS = range(HELLO, MOVED + 1)

FLAG_NO_CACHE = 1  # INFER: answer from the engine, and do not keep the answer
FLAG_CACHE_HIT = 2  # RESULT: the answer came from the cache

# magic, version, kind, flags, request id, model id, arg, meta bytes, tensors, status, body bytes, six stage times
HEADER = struct.Struct("<4sBBHQIIIHHQ6I")
# number, datatype, rank, pad, bytes, eight dimensions
DESCRIPTOR = struct.Struct("<BBB5xQ8I16x")

DATATYPE_CODES = {name: code for code, name in enumerate(NUMPY_NAMES, start=1)}
DATATYPES_BY_CODE = {code: name for name, code in DATATYPE_CODES.items()}
ITEM_BYTES = {name: 1 if name == "BOOL" else int(name.lstrip("UINTFP")) // 8 for name in NUMPY_NAMES}

_PAD = bytes(ALIGNMENT)
_NO_STAGES = (0, 0, 0, 0, 0, 0)
Buffer = bytes | bytearray | memoryview


class WireTensor(NamedTuple):
    """One tensor of a frame, `data` still in the connection's buffer."""

    number: int
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


class Frame(NamedTuple):
    """One received frame. `arg` is the deadline in us (INFER), the batch (RESULT), or retry-after in ms (ERROR).

    `tensors` is the same object as in the frame before when descriptors and place did not change: whoever
    builds arrays over it may keep them.
    """

    kind: int
    flags: int
    request_id: int
    model_id: int
    arg: int
    status: int
    meta: bytes
    tensors: tuple[WireTensor, ...]
    stages: tuple[int, ...]

    def json(self) -> dict[str, Any]:
        """The frame's meta as a JSON object. Raises ProtocolError."""
        try:
            value = json.loads(self.meta) if self.meta else {}
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the frame's meta is not JSON: {type(error).__name__}") from error
        if not isinstance(value, dict):
            raise ProtocolError("the frame's meta is not a JSON object")
        return value


class FrameBuffer:
    """Collects one connection's bytes and gives its frames in order.

    A frame's memoryviews are valid until the next call of `next_frame`, which may move or drop them.
    Raises ProtocolError for bytes that are not the protocol, before any of their size is allocated.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX, size_bytes: int = 8192) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._allocate(size_bytes)
        self._filled = 0  # bytes received and not yet given out as a frame, from offset 0
        self._taken = 0  # length of the frame given out last
        self._descriptors = (b"", 0, 0)
        self._tensors: tuple[WireTensor, ...] = ()

    def _allocate(self, size_bytes: int) -> None:
        # An anonymous map is page-aligned and costs nothing until it is touched.
        self._view = memoryview(mmap.mmap(-1, size_bytes))

    def writable(self) -> memoryview:
        """Where the next bytes belong; never empty. Call `wrote` with how many came."""
        self._drop_taken()
        return self._view[self._filled :]

    def wrote(self, count: int) -> None:
        self._filled += count

    def missing(self) -> int:
        """How many bytes are certainly still to come for the next frame; 0 when it is complete."""
        self._drop_taken()
        return max(0, self._needed() - self._filled)

    def next_frame(self) -> Frame | None:
        """The next complete frame, or None when more bytes must come first."""
        self._drop_taken()
        filled = self._filled
        if filled < 64:
            return None
        header = HEADER.unpack_from(self._view)
        size = 64 + header[10]
        if filled < size:
            self._needed()
            return None
        kind, meta_bytes, count = self._check(header)
        self._taken = size
        meta = b""
        offset = 64
        if meta_bytes:
            meta = bytes(self._view[64 : 64 + meta_bytes])
            offset += _padded(meta_bytes)
        tensors = self._tensors_at(offset, count, size) if count else self._no_tensors(offset, size)
        return Frame(kind, header[3], header[4], header[5], header[6], header[9], meta, tensors, header[11:])

    def _needed(self) -> int:
        """Bytes of the frame that begins at offset 0, as far as is known; makes room for them."""
        if self._filled < 64:
            return 64
        header = HEADER.unpack_from(self._view)
        self._check(header)
        size: int = 64 + header[10]
        if size > len(self._view):
            old = self._view
            self._allocate(_padded_to_page(size))
            self._view[: self._filled] = old[: self._filled]
            self._descriptors = (b"", 0, 0)
        return size

    def _check(self, header: tuple[Any, ...]) -> tuple[int, int, int]:
        magic, version, kind, _, _, _, _, meta_bytes, count, _, body_bytes = header[:11]
        if magic != MAGIC:
            raise ProtocolError(f"a frame begins with {magic!r}, not {MAGIC!r}: this is not the EdgeRT protocol")
        if version != VERSION:
            raise ProtocolError(f"protocol version {version}; this side speaks {VERSION}")
        if kind not in KINDS:
            raise ProtocolError(f"frame kind {kind} is not known")
        if 64 + body_bytes > self._frame_bytes_max:
            raise ProtocolError(f"a frame of {64 + body_bytes} bytes; at most {self._frame_bytes_max} are allowed")
        if meta_bytes > META_BYTES_MAX or count > TENSORS_MAX:
            raise ProtocolError(
                f"{meta_bytes} bytes of meta and {count} tensors; at most {META_BYTES_MAX} and {TENSORS_MAX}"
            )
        if _padded(meta_bytes) + 64 * count > body_bytes:
            raise ProtocolError("the header's lengths contradict each other")
        return kind, meta_bytes, count

    def _no_tensors(self, offset: int, size: int) -> tuple[WireTensor, ...]:
        if offset != size:
            raise ProtocolError("a frame's body is longer than its parts")
        return ()

    def _tensors_at(self, offset: int, count: int, size: int) -> tuple[WireTensor, ...]:
        # Same descriptors at the same place: the views made last time still say it all.
        key = (bytes(self._view[offset : offset + 64 * count]), offset, size)
        if key != self._descriptors:
            self._tensors = self._parse_tensors(offset, count, size)
            self._descriptors = key
        return self._tensors

    def _parse_tensors(self, offset: int, count: int, size: int) -> tuple[WireTensor, ...]:
        tensors = []
        data = offset + 64 * count
        for i in range(count):
            number, code, rank, nbytes, *dims = DESCRIPTOR.unpack_from(self._view, offset + 64 * i)
            datatype = DATATYPES_BY_CODE.get(code)
            if datatype is None or rank > MAX_RANK:
                raise ProtocolError(f"tensor {i} has datatype code {code} and rank {rank}, which are not known")
            shape = tuple(dims[:rank])
            if prod(shape) * ITEM_BYTES[datatype] != nbytes:
                raise ProtocolError(f"tensor {i} says {nbytes} bytes for {datatype} of shape {list(shape)}")
            if data + nbytes > size:
                raise ProtocolError(f"tensor {i} reaches beyond its frame")
            tensors.append(WireTensor(number, datatype, shape, self._view[data : data + nbytes]))
            data += _padded(nbytes)
        if data != size:
            raise ProtocolError("a frame's body is longer than its parts")
        return tuple(tensors)

    def _drop_taken(self) -> None:
        if not self._taken:
            return
        rest = self._filled - self._taken
        if rest:  # a client that does not wait for its answers
            self._view[:rest] = bytes(self._view[self._taken : self._filled])
        self._filled, self._taken = rest, 0


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be sent: its descriptor, ready made, and its bytes."""

    descriptor: bytes
    data: Buffer


def descriptor(number: int, datatype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """The 64 bytes that announce one tensor. Raises ProtocolError for more than eight axes."""
    if len(shape) > MAX_RANK:
        raise ProtocolError(f"a tensor of {len(shape)} axes; at most {MAX_RANK} travel")
    dims = (*shape, *(0,) * (MAX_RANK - len(shape)))
    return DESCRIPTOR.pack(number, DATATYPE_CODES[datatype], len(shape), nbytes, *dims)


def frame(
    kind: int,
    *,
    request_id: int = 0,
    model_id: int = 0,
    flags: int = 0,
    arg: int = 0,
    status: int = 0,
    meta: bytes = b"",
    tensors: Sequence[OutTensor] = (),
    stages: Sequence[int] = _NO_STAGES,
) -> list[Buffer]:
    """The buffers of one frame, in order, for `socket.sendmsg`. Tensor bytes are not copied."""
    parts: list[Buffer] = [b""]
    body = 0
    if meta:
        padded = meta + _PAD[: -len(meta) % 64]
        parts.append(padded)
        body = len(padded)
    if tensors:
        parts.append(tensors[0].descriptor if len(tensors) == 1 else b"".join(t.descriptor for t in tensors))
        body += 64 * len(tensors)
        for tensor in tensors:
            nbytes = len(tensor.data)
            parts.append(tensor.data)
            if nbytes & 63:
                parts.append(_PAD[: -nbytes % 64])
            body += _padded(nbytes)
    parts[0] = HEADER.pack(
        MAGIC, VERSION, kind, flags, request_id, model_id, arg, len(meta), len(tensors), status, body, *stages
    )
    return parts


def json_frame(kind: int, value: dict[str, Any], *, request_id: int = 0, status: int = 0, arg: int = 0) -> bytes:
    """A frame whose only content is a JSON object."""
    meta = json.dumps(value, separators=(",", ":")).encode()
    return b"".join(frame(kind, request_id=request_id, status=status, arg=arg, meta=meta))


def error_frame(error: EdgeRTError, *, request_id: int = 0) -> bytes:
    """The frame that carries `error` to the other side."""
    retry_after_ms = 0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000))
    value = {"code": error.code, "message": error.message, "retryable": error.retryable}
    return json_frame(ERROR, value, request_id=request_id, status=error.wire_code, arg=retry_after_ms)


def error_of(received: Frame) -> EdgeRTError:
    """The error that an ERROR frame carries, as its own class."""
    message = str(received.json().get("message", "the daemon gave no reason"))
    return by_wire_code(received.status)(message, retry_after_s=received.arg / 1000 if received.arg else None)


def stage_times(received: Frame) -> StageTimes:
    return StageTimes(*received.stages)


def _padded(size: int) -> int:
    return (size + 63) & ~63


def _padded_to_page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
