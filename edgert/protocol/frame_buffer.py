"""The bytes that one connection has received, and the frames in them.

Receive into `room`, then call `feed` with the number of bytes that came. A FrameBuffer never reads a socket, and it
needs no NumPy: tensors come out as memoryviews.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Callable
from math import prod
from typing import NamedTuple

from edgert.errors import ProtocolError
from edgert.protocol.wire import (
    DATATYPES_BY_CODE,
    DESCRIPTOR,
    DESCRIPTOR_BYTES,
    FLAG_SHARED,
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    HELLO,
    MAGIC,
    META_BYTES_MAX,
    RESUME,
    TENSORS_MAX,
    VERSION,
    Frame,
    WireTensor,
    aligned,
)
from edgert.tensors import ITEM_BYTES, MAX_RANK

HUGE_PAGE_BYTES = 2 * 1024**2

# The header's 64 bytes by what differs between frames: beginning, flags, request id, model id, arg, lengths, stages.
_ALIKE = struct.Struct("<6sHQII16s24s")
_BEGINNING = struct.Struct("<4sBB")
_LENGTHS, _LENGTHS_OFFSET = struct.Struct("<IHHQ"), 24  # meta bytes, tensors, status, body bytes
_new = tuple.__new__  # makes a NamedTuple without the Python function in between


class _Last(NamedTuple):
    """The last frame, if it came alone: a frame with the same header fields and descriptors needs no checks.

    `filled` is how many bytes of it came over the socket (the header alone, if the body was in shared memory); 0 if
    no frame can be like it. `end` is where its descriptors end; they begin after the header.
    """

    filled: int
    head: bytes
    lengths: bytes
    shared: int
    kind: int
    end: int
    size: int


_NONE = _Last(0, b"", b"", 0, 0, 0, 0)


class FrameBuffer:
    """Collects the bytes of one connection and returns its frames in order.

    The memoryviews of a frame are valid until the next bytes are received into `room`. Bytes that are not the protocol
    raise ProtocolError, before any memory of the size that they announce is allocated. `shared` is the memory that
    holds the bodies of FLAG_SHARED frames, after room for a header.

    Every request passes here, at both ends. So a frame that arrives whole and whose kind, lengths and descriptors
    equal those of the last one is not checked again.
    """

    def __init__(
        self,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        size_bytes: int = 8192,
        resizing: Callable[[int, int], None] = lambda old_bytes, new_bytes: None,
    ) -> None:
        """`resizing` is called before the buffer changes its size, and may refuse by raising an error."""
        self._resizing = resizing
        self._small_bytes = size_bytes
        self._body_bytes_max = frame_bytes_max - HEADER_BYTES
        self._filled = 0  # bytes from offset 0 that were received and do not belong to a returned frame
        self._taken = 0  # length of the frame returned last, if more bytes follow it
        self.more = False  # whether bytes follow the frame returned last
        self.shared: memoryview | None = None
        self._allocate(size_bytes)

    def limit(self, frame_bytes_max: int) -> None:
        """Accept frames of at most this size from now on."""
        self._body_bytes_max = frame_bytes_max - HEADER_BYTES
        self._last = _NONE

    def _allocate(self, size_bytes: int) -> None:
        # An anonymous map is page-aligned and costs nothing until it is touched. A private one costs half of a shared one
        # then, and a sixth in huge pages.
        memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size_bytes >= HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError, AttributeError):  # not every kernel has huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = self.room = memoryview(memory)
        self._descriptors = b""
        self._place = (0, 0)  # offset and frame length that `_tensors` was made for
        self._tensors: tuple[WireTensor, ...] = ()
        self._last = _NONE

    def feed(self, count: int) -> Frame | None:
        """Return the next frame once it is complete; `count` more bytes have come (0: look at those already here)."""
        if self._taken:
            self._drop_taken()
        filled = self._filled + count
        last_filled, last_head, last_lengths, last_shared, kind, end, size = self._last
        if filled == last_filled:
            view = self._view
            head, flags, request_id, model_id, arg, lengths, stages = _ALIKE.unpack_from(view)
            if head == last_head and lengths == last_lengths and flags & FLAG_SHARED == last_shared:
                if last_shared:
                    assert self.shared is not None  # the last frame was in it
                    view[HEADER_BYTES:size] = self.shared[HEADER_BYTES:size]
                if view[HEADER_BYTES:end].tobytes() == self._descriptors:
                    self._filled, self.room = 0, view
                    return _new(Frame, (kind, flags, request_id, model_id, arg, 0, b"", self._tensors, stages))
        if filled < HEADER_BYTES:
            self._wait_for_more(filled)
            return None
        return self._parse(filled)

    @property
    def size_bytes(self) -> int:
        return len(self._view)

    def shrink(self) -> None:
        """Release the memory of a large frame. Call it between frames, when no view of them is used any more.

        The next large frame then costs page faults, which take up to ten times as long as the copy (bench.buffers).
        """
        if len(self._view) > self._small_bytes and not self._filled:
            self._resizing(len(self._view), self._small_bytes)
            self._allocate(self._small_bytes)

    def missing(self) -> int:
        """Return how many bytes the frame that has begun needs at least; 0 between frames."""
        if not self._filled or self._taken:
            return 0
        if self._filled < HEADER_BYTES:
            return HEADER_BYTES - self._filled
        *_, body_bytes = _LENGTHS.unpack_from(self._view, _LENGTHS_OFFSET)
        return HEADER_BYTES + int(body_bytes) - self._filled

    def _parse(self, filled: int) -> Frame | None:
        """Return the frame that begins at offset 0, or None while more of it must come. Raises ProtocolError."""
        head, flags, request_id, model_id, arg, lengths, stages = _ALIKE.unpack_from(self._view)
        magic, version, kind = _BEGINNING.unpack(head)
        meta_bytes, tensor_count, status, body_bytes = _LENGTHS.unpack(lengths)
        self._check(magic, version, kind, meta_bytes, tensor_count, body_bytes)
        offset = HEADER_BYTES + aligned(meta_bytes)
        size = HEADER_BYTES + body_bytes
        received = filled
        if flags & FLAG_SHARED:
            filled = self._copy_shared(size, filled)
        elif filled < size:
            self._make_room(size, filled)
            return None
        meta = bytes(self._view[HEADER_BYTES : HEADER_BYTES + meta_bytes]) if meta_bytes else b""
        tensors = self._tensors_at(offset, tensor_count, size)
        if filled == size:
            self._filled, self.room = 0, self._view
            plain = tensors and not meta_bytes and not status
            end = offset + DESCRIPTOR_BYTES * tensor_count
            self._last = _Last(received, head, lengths, flags & FLAG_SHARED, kind, end, size) if plain else _NONE
        else:  # a client that does not wait for its answers
            self._filled, self._taken, self.more = filled, size, True
            self._last = _NONE
        return Frame(kind, flags, request_id, model_id, arg, status, meta, tensors, stages)

    def _check(
        self, magic: bytes, version: int, kind: int, meta_bytes: int, tensor_count: int, body_bytes: int
    ) -> None:
        """Raise ProtocolError if the header breaks a rule."""
        if magic != MAGIC:
            raise ProtocolError(f"a frame begins with {magic!r}, not {MAGIC!r}: this is not the EdgeRT protocol")
        if version != VERSION:
            raise ProtocolError(f"protocol version {version} is not supported; this side speaks {VERSION}")
        if not HELLO <= kind <= RESUME:
            raise ProtocolError(f"frame kind {kind} is not known")
        if body_bytes > self._body_bytes_max:
            raise ProtocolError(
                f"a frame of {HEADER_BYTES + body_bytes} bytes is too large; at most {HEADER_BYTES + self._body_bytes_max} are allowed"
            )
        if meta_bytes > META_BYTES_MAX or tensor_count > TENSORS_MAX:
            raise ProtocolError(
                f"{meta_bytes} bytes of meta and {tensor_count} tensors; at most {META_BYTES_MAX} and {TENSORS_MAX}"
            )
        if aligned(meta_bytes) + DESCRIPTOR_BYTES * tensor_count > body_bytes:
            raise ProtocolError("the lengths in the header contradict each other")

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
        """Copy the body out of the shared memory, and return how many bytes the buffer holds then.

        After the copy, the other end cannot change what is checked and used. Bytes that followed the header over the
        socket (a MOVED after an answer, for example) are put behind the body.
        """
        if self.shared is None or size > len(self.shared):
            raise ProtocolError(f"a frame of {size} bytes in shared memory that this connection does not have")
        rest = bytes(self._view[HEADER_BYTES:filled])
        self._make_room(size + len(rest), HEADER_BYTES)
        self._view[HEADER_BYTES:size] = self.shared[HEADER_BYTES:size]
        self._view[size : size + len(rest)] = rest
        return size + len(rest)

    def _drop_taken(self) -> None:
        """Move the bytes that follow the last frame to the front; its views are not valid any more."""
        rest = self._filled - self._taken
        self._view[:rest] = bytes(self._view[self._taken : self._filled])
        self._taken, self.more = 0, False
        self._wait_for_more(rest)

    def _tensors_at(self, offset: int, count: int, size: int) -> tuple[WireTensor, ...]:
        if not count:
            if offset != size:
                raise ProtocolError("a frame's body is longer than its parts")
            return ()
        descriptors = bytes(self._view[offset : offset + DESCRIPTOR_BYTES * count])
        # With the same descriptors at the same place, the views of the last frame are still right.
        if descriptors != self._descriptors or self._place != (offset, size):
            self._tensors = self._parse_tensors(offset, count, size)
            self._descriptors, self._place = descriptors, (offset, size)
        return self._tensors

    def _parse_tensors(self, offset: int, count: int, size: int) -> tuple[WireTensor, ...]:
        tensors = []
        data = offset + DESCRIPTOR_BYTES * count
        for i in range(count):
            number, code, rank, nbytes, *dims = DESCRIPTOR.unpack_from(self._view, offset + DESCRIPTOR_BYTES * i)
            datatype = DATATYPES_BY_CODE.get(code)
            if datatype is None or rank > MAX_RANK:
                raise ProtocolError(f"tensor {i} has datatype code {code} and rank {rank}, which are not known")
            shape = tuple(dims[:rank])
            if prod(shape) * ITEM_BYTES[datatype] != nbytes:
                raise ProtocolError(f"tensor {i} states {nbytes} bytes for {datatype} of shape {list(shape)}")
            if data + nbytes > size:
                raise ProtocolError(f"tensor {i} reaches beyond its frame")
            tensors.append(WireTensor(number, datatype, shape, self._view[data : data + nbytes]))
            data += aligned(nbytes)
        if data != size:
            raise ProtocolError("a frame's body is longer than its parts")
        return tuple(tensors)
