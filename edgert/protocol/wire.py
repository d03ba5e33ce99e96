"""Sans-IO codec of the local protocol (docs/protocol.md): bytes in, frames out; frames in, bytes out.

A frame is a 64-byte header, then `meta` (JSON), then one 64-byte descriptor a tensor, then the tensors'
bytes; each part is padded with zeros to a multiple of 64, so that every tensor lies aligned in the
buffer it was received into and is used where it lies. All numbers are little-endian.

Between an app and the daemon on one machine a frame's body may lie in memory that both see (`FLAG_SHARED`):
then only the header travels, and whoever receives it copies the body out before looking at it.

`FrameBuffer` owns the bytes of one connection: receive into `room`, then `feed` how many came. It never reads
a socket, and it needs no NumPy: tensors come out as memoryviews.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Sequence
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
KEEP_BYTES_MAX = 4 * 1024**2  # a buffer up to this size is kept for the next frame

HELLO, WELCOME, INFER, RESULT, ERROR, PING, PONG, MOVED = range(1, 9)

FLAG_NO_CACHE = 1  # INFER: answer from the engine, and do not keep the answer
FLAG_CACHE_HIT = 2  # RESULT: the answer came from the cache
FLAG_HIGH_PRIORITY = 8  # INFER: taken before the others that wait for the engine
FLAG_NEAR_HIT = 16  # RESULT, with FLAG_CACHE_HIT: the cached answer is that of a nearly equal input
FLAG_SHARED = 4  # INFER, RESULT: the body lies in the shared memory that came with the WELCOME

# magic, version, kind, flags, request id, model id, arg, meta bytes, tensors, status, body bytes, six stage times
HEADER = struct.Struct("<4sBBHQIIIHHQ6I")
# The same 64 bytes by what changes from frame to frame: beginning, flags, request id, model id, arg, lengths, stages
_LIKE = struct.Struct("<6sHQII16s24s")
_BEGINNING = struct.Struct("<4sBB")
_LENGTHS = struct.Struct("<IHHQ")
# number, datatype, rank, pad, bytes, eight dimensions
DESCRIPTOR = struct.Struct("<BBB5xQ8I16x")

DATATYPE_CODES = {name: code for code, name in enumerate(NUMPY_NAMES, start=1)}
DATATYPES_BY_CODE = {code: name for name, code in DATATYPE_CODES.items()}
ITEM_BYTES = {name: 1 if name == "BOOL" else int(name.lstrip("UINTFP")) // 8 for name in NUMPY_NAMES}

_PAD = bytes(ALIGNMENT)
_new = tuple.__new__  # a NamedTuple without the call in between
_NO_STAGES = (0, 0, 0, 0, 0, 0)
# What differs between frames that are alike, to be written into one that is kept: flags, request id, model id, arg;
# and the stage times.
VARYING, VARYING_OFFSET = struct.Struct("<HQII"), 6
STAGES, STAGES_OFFSET = struct.Struct("<6I"), 40
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
    builds arrays over it may keep them. `stages` are the header's, packed as they came: see `stage_times`.
    """

    kind: int
    flags: int
    request_id: int
    model_id: int
    arg: int
    status: int
    meta: bytes
    tensors: tuple[WireTensor, ...]
    stages: bytes

    def json(self) -> dict[str, Any]:
        """The frame's meta as a JSON object. Raises ProtocolError."""
        try:
            value = json.loads(self.meta) if self.meta else {}
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the frame's meta is not JSON: {type(error).__name__}") from error
        if not isinstance(value, dict):
            raise ProtocolError("the frame's meta is not a JSON object")
        return value


class _Like(NamedTuple):
    """What the last frame, which came alone, said of itself.

    `filled` is how many bytes of it were received: all, or the header alone where the rest lay in shared memory;
    0 where the next frame can be like none. `end` is where its descriptors end, which begin after the header.
    """

    filled: int
    head: bytes
    lengths: bytes
    shared: int
    kind: int
    end: int
    size: int


_NOTHING = _Like(0, b"", b"", 0, 0, 0, 0)


class FrameBuffer:
    """Collects one connection's bytes and gives its frames in order.

    Receive into `room`, then call `feed` with how many bytes came. A frame's memoryviews are valid until the
    next bytes are received into `room`. Raises ProtocolError for bytes that are not the protocol, before any
    of their size is allocated.

    This is the hot path of both ends: of a frame that arrives whole and says the same of itself as the last
    one (kind, lengths, descriptors), only what differs is looked at, as all the rest was checked then.
    """

    def __init__(
        self,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        size_bytes: int = 8192,
        resizing: Callable[[int, int], None] = lambda old_bytes, new_bytes: None,
    ) -> None:
        """`resizing` is told before the buffer changes its size, and may refuse by raising."""
        self._resizing = resizing
        self._small_bytes = size_bytes
        self._body_bytes_max = frame_bytes_max - 64
        self._filled = 0  # bytes from offset 0 that were received and not given out as a frame
        self._taken = 0  # length of the frame given out last, where more bytes follow it
        self.more = False  # whether bytes follow the frame given out last
        self.shared: memoryview | None = None  # where the bodies of FLAG_SHARED frames lie, from offset 64
        self._allocate(size_bytes)

    def limit(self, frame_bytes_max: int) -> None:
        """Take frames of at most so many bytes from now on."""
        self._body_bytes_max = frame_bytes_max - 64
        self._like = _NOTHING

    def _allocate(self, size_bytes: int) -> None:
        # An anonymous map is page-aligned and costs nothing until it is touched.
        self._view = self.room = memoryview(mmap.mmap(-1, size_bytes))
        self._descriptors = b""
        self._place = (0, 0)  # offset and frame length that `_tensors` was made for
        self._tensors: tuple[WireTensor, ...] = ()
        self._like = _NOTHING

    def feed(self, count: int) -> Frame | None:
        """The next frame once it is complete, `count` more bytes having come (0 asks for what is there already)."""
        if self._taken:
            self._drop_taken()
        filled = self._filled + count
        like_filled, like_head, like_lengths, like_shared, kind, end, size = self._like
        if filled == like_filled:
            view = self._view
            head, flags, request_id, model_id, arg, lengths, stages = _LIKE.unpack_from(view)
            if head == like_head and lengths == like_lengths and flags & FLAG_SHARED == like_shared:
                if like_shared:
                    assert self.shared is not None  # the frame before came through it
                    view[64:size] = self.shared[64:size]
                if view[64:end].tobytes() == self._descriptors:
                    self._filled, self.room = 0, view
                    return _new(Frame, (kind, flags, request_id, model_id, arg, 0, b"", self._tensors, stages))
        if filled < 64:
            self._wait_for_more(filled)
            return None
        return self._parse(filled)

    def _parse(self, filled: int) -> Frame | None:
        """The frame that begins at offset 0, or None where more of it must come. Raises ProtocolError."""
        head, flags, request_id, model_id, arg, lengths, stages = _LIKE.unpack_from(self._view)
        magic, version, kind = _BEGINNING.unpack(head)
        meta_bytes, tensor_count, status, body_bytes = _LENGTHS.unpack(lengths)
        offset = 64 + ((meta_bytes + 63) & ~63)
        size = 64 + body_bytes
        if (
            magic != MAGIC
            or version != VERSION
            or not HELLO <= kind <= MOVED
            or body_bytes > self._body_bytes_max
            or meta_bytes > META_BYTES_MAX
            or tensor_count > TENSORS_MAX
            or offset + 64 * tensor_count > size
        ):
            raise self._refusal(magic, version, kind, meta_bytes, tensor_count, body_bytes)
        received = filled
        if flags & FLAG_SHARED:
            filled = self._copy_shared(size, filled)
        elif filled < size:
            self._make_room(size, filled)
            return None
        meta = bytes(self._view[64 : 64 + meta_bytes]) if meta_bytes else b""
        tensors = self._tensors_at(offset, tensor_count, size)
        if filled == size:
            self._filled, self.room = 0, self._view
            plain = tensors and not meta_bytes and not status
            end = offset + 64 * tensor_count
            self._like = _Like(received, head, lengths, flags & FLAG_SHARED, kind, end, size) if plain else _NOTHING
        else:  # a client that does not wait for its answers
            self._filled, self._taken, self.more = filled, size, True
            self._like = _NOTHING
        return Frame(kind, flags, request_id, model_id, arg, status, meta, tensors, stages)

    @property
    def size_bytes(self) -> int:
        """How large the buffer is at present."""
        return len(self._view)

    def shrink(self) -> None:
        """Give the memory of a large frame back; call it between frames, when its views are not used any more."""
        if len(self._view) > KEEP_BYTES_MAX and not self._filled:
            self._resizing(len(self._view), self._small_bytes)
            self._allocate(self._small_bytes)

    def missing(self) -> int:
        """How many bytes are certainly still to come for the frame that has begun; 0 between frames."""
        if not self._filled or self._taken:
            return 0
        if self._filled < 64:
            return 64 - self._filled
        return 64 + int(HEADER.unpack_from(self._view)[10]) - self._filled

    def _wait_for_more(self, filled: int) -> None:
        self._filled, self.room = filled, self._view[filled:]

    def _make_room(self, size: int, filled: int) -> None:
        if size > len(self._view):
            old, new_bytes = self._view, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            self._resizing(len(old), new_bytes)
            self._allocate(new_bytes)
            self._view[:filled] = old[:filled]
        self._wait_for_more(filled)

    def _copy_shared(self, size: int, filled: int) -> int:
        """Bring the body out of the shared memory, once: what is checked and used cannot be changed any more.

        What followed the header, a MOVED after an answer, say, is put behind it. How much the buffer holds then.
        """
        if self.shared is None or size > len(self.shared):
            raise ProtocolError(f"a frame of {size} bytes in shared memory that this connection does not have")
        rest = bytes(self._view[64:filled])
        self._make_room(size + len(rest), 64)
        self._view[64:size] = self.shared[64:size]
        self._view[size : size + len(rest)] = rest
        return size + len(rest)

    def _drop_taken(self) -> None:
        """Move what followed the last frame to the front. Its views are given up by now."""
        rest = self._filled - self._taken
        self._view[:rest] = bytes(self._view[self._taken : self._filled])
        self._taken, self.more = 0, False
        self._wait_for_more(rest)

    def _tensors_at(self, offset: int, count: int, size: int) -> tuple[WireTensor, ...]:
        if not count:
            if offset != size:
                raise ProtocolError("a frame's body is longer than its parts")
            return ()
        descriptors = bytes(self._view[offset : offset + 64 * count])
        # Same descriptors at the same place: the views made last time still say it all.
        if descriptors != self._descriptors or self._place != (offset, size):
            self._tensors = self._parse_tensors(offset, count, size)
            self._descriptors, self._place = descriptors, (offset, size)
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
            data += (nbytes + 63) & ~63
        if data != size:
            raise ProtocolError("a frame's body is longer than its parts")
        return tuple(tensors)

    def _refusal(
        self, magic: bytes, version: int, kind: int, meta_bytes: int, tensor_count: int, body_bytes: int
    ) -> ProtocolError:
        """Which of the header's rules is broken."""
        if magic != MAGIC:
            return ProtocolError(f"a frame begins with {magic!r}, not {MAGIC!r}: this is not the EdgeRT protocol")
        if version != VERSION:
            return ProtocolError(f"protocol version {version}; this side speaks {VERSION}")
        if not HELLO <= kind <= MOVED:
            return ProtocolError(f"frame kind {kind} is not known")
        if body_bytes > self._body_bytes_max:
            return ProtocolError(f"a frame of {64 + body_bytes} bytes; at most {64 + self._body_bytes_max} are allowed")
        if meta_bytes > META_BYTES_MAX or tensor_count > TENSORS_MAX:
            return ProtocolError(
                f"{meta_bytes} bytes of meta and {tensor_count} tensors; at most {META_BYTES_MAX} and {TENSORS_MAX}"
            )
        return ProtocolError("the header's lengths contradict each other")


class OutTensor(NamedTuple):
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
        parts.append(tensors[0][0] if len(tensors) == 1 else b"".join(t[0] for t in tensors))
        body += 64 * len(tensors)
        for _, data in tensors:
            nbytes = len(data)
            parts.append(data)
            if nbytes & 63:
                parts.append(_PAD[: -nbytes % 64])
            body += (nbytes + 63) & ~63
    parts[0] = HEADER.pack(
        MAGIC, VERSION, kind, flags, request_id, model_id, arg, len(meta), len(tensors), status, body, *stages
    )
    return parts


def share(parts: Sequence[Buffer], area: memoryview) -> bytes | None:
    """Put the body of a frame made by `frame` into `area`, from offset 64; the header that announces it there.

    None where it does not fit: then the frame travels as it is.
    """
    at = 64
    for part in parts[1:]:
        end = at + len(part)
        if end > len(area):
            return None
        area[at:end] = part
        at = end
    header = bytearray(parts[0])
    header[6] |= FLAG_SHARED
    return bytes(header)


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
    return StageTimes(*STAGES.unpack(received.stages))
