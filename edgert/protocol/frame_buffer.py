"""The received bytes of one connection, and the frames in these bytes.

Receive into `room`, then call `feed` with the number of received bytes. A FrameBuffer never reads a socket, and
needs no NumPy: tensors are memoryviews.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Callable
from math import prod

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

# The header's 64 bytes in groups that change together: start, flags, request id, model id, arg, lengths, stages.
_ALIKE = struct.Struct("<6sHQII16s24s")
_BEGINNING = struct.Struct("<4sBB")
_LENGTHS = struct.Struct("<IHHQ")  # meta bytes, number of tensors, status, body bytes
_LENGTHS_OFFSET = 24  # the offset of these four fields in the header
_new = tuple.__new__  # creates a NamedTuple faster, because it does not call the NamedTuple's Python function

# Facts about the last frame, for the next frame of the same form:
# - the number of its bytes from the socket (only the header, if the body was in shared memory). It is -1 if no frame
#   can have the same form: the last frame had meta, a status or no tensors, or more bytes arrived with it;
# - two parts of its header: the bytes with magic, version and kind, and the bytes with the lengths;
# - FLAG_SHARED if the frame had this flag, else 0; the kind;
# - the offset at which its descriptors end; its size; the descriptors; the tensors that they describe.
# These facts are a plain tuple, because Python unpacks a plain tuple fastest.
_Last = tuple[int, bytes, bytes, int, int, int, int, bytes, tuple[WireTensor, ...]]
# The form of a frame that is read without `feed`: its size, the two parts of its header (see above), the place of its
# descriptors in the buffer, and their bytes. FORM reads the first part, the flags, the request id and the second part.
FrameForm = tuple[int, bytes, bytes, memoryview, bytes]
FORM = struct.Struct("<6sHQ8x16s24x")
_NONE: _Last = (-1, b"", b"", 0, 0, 0, 0, b"", ())


class FrameBuffer:
    """Collects the bytes of one connection and returns its frames in order.

    Bytes that break the protocol raise ProtocolError, before the buffer allocates memory of the announced size.
    `shared` is the memory that contains the body of each FLAG_SHARED frame. The body begins after space for a header.

    Theory of operation: each frame begins at the buffer's offset 0, so that its tensors are aligned. The buffer is in
    one of three states:

    - No frame has begun. `_filled` is 0, and `room` is the whole buffer. The buffer still contains the last returned
      frame, so the frame's memoryviews are valid until the next bytes arrive.
    - A frame has begun. Its first `_filled` bytes are in the buffer, and `room` is behind these bytes. Once the header
      is complete, the buffer is large enough for the whole frame.
    - A frame was returned, and `more` bytes of the next frames are behind this frame; `_filled` counts both. `feed(0)`
      moves the bytes to the front. Receive nothing before this call.

    Every request passes through this code, at both ends. So `feed` skips the checks for a frame that arrives whole and
    has the kind, lengths and descriptors of the last frame.
    """

    def __init__(
        self,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        size_bytes: int = 8192,
        resizing: Callable[[int, int], None] = lambda old_bytes, new_bytes: None,
    ) -> None:
        """Call `resizing` before each change of the buffer's size; an error of `resizing` prevents the change."""
        self._resizing = resizing
        self._small_bytes = size_bytes
        self._body_bytes_max = frame_bytes_max - HEADER_BYTES
        self._filled = 0
        self.more = 0
        self.shared: memoryview | None = None
        self._allocate(size_bytes)

    def limit(self, frame_bytes_max: int) -> None:
        """Accept frames of at most `frame_bytes_max` from now on."""
        self._body_bytes_max = frame_bytes_max - HEADER_BYTES
        self._last = _NONE

    def _allocate(self, size_bytes: int) -> None:
        # An anonymous map is page-aligned and costs nothing before its first use. The first use of a private map costs
        # half as much as the first use of a shared map, and a sixth as much with huge pages.
        memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size_bytes >= HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError, AttributeError):  # not every kernel has huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = self.room = memoryview(memory)
        self._last = _NONE

    def feed(self, count: int) -> Frame | None:
        """Return the next frame if it is complete. `count` is the number of new bytes; 0 to read `more`."""
        if self.more:
            self._move_to_front()
        filled = self._filled + count
        last_filled, last_head, last_lengths, last_shared, kind, end, size, descriptors, tensors = self._last
        if filled == last_filled:
            view = self._view
            head, flags, request_id, model_id, arg, lengths, stages = _ALIKE.unpack_from(view)
            if head == last_head and lengths == last_lengths and flags & FLAG_SHARED == last_shared:
                if last_shared:
                    assert self.shared is not None  # the last frame was in shared memory
                    view[HEADER_BYTES:size] = self.shared[HEADER_BYTES:size]
                if view[HEADER_BYTES:end].tobytes() == descriptors:
                    self._filled, self.room = 0, view
                    return _new(Frame, (kind, flags, request_id, model_id, arg, 0, b"", tensors, stages))
        if filled < HEADER_BYTES:
            self._wait_behind(filled)
            return None
        return self._parse(filled)

    def form(self) -> FrameForm | None:
        """Return the form of the last frame, for later frames; None if no frame can have this form.

        Such a frame may be read without `feed`, if it arrives whole: the last frame's tensors then show its values.
        """
        received, head, lengths, shared, _, end, _, descriptors, _ = self._last
        if received < 0 or shared or self._filled:
            return None
        return received, head, lengths, self._view[HEADER_BYTES:end], descriptors

    @property
    def size_bytes(self) -> int:
        return len(self._view)

    def shrink(self) -> None:
        """Release the memory of a large frame. Call this between frames, when no view of a frame is in use.

        The next large frame then costs page faults, which take up to ten times as long as the copy (bench.buffers).
        """
        if len(self._view) > self._small_bytes and not self._filled:
            self._resizing(len(self._view), self._small_bytes)
            self._allocate(self._small_bytes)

    def missing(self) -> int:
        """Return the least number of bytes that the current frame still lacks; 0 between frames."""
        if not self._filled or self.more:
            return 0
        if self._filled < HEADER_BYTES:
            return HEADER_BYTES - self._filled
        *_, body_bytes = _LENGTHS.unpack_from(self._view, _LENGTHS_OFFSET)
        return HEADER_BYTES + int(body_bytes) - self._filled

    def _parse(self, filled: int) -> Frame | None:
        """Return the frame at offset 0, or None while some of its bytes are missing. Raises ProtocolError."""
        head, flags, request_id, model_id, arg, lengths, stages = _ALIKE.unpack_from(self._view)
        magic, version, kind = _BEGINNING.unpack(head)
        meta_bytes, tensor_count, status, body_bytes = _LENGTHS.unpack(lengths)
        self._check(magic, version, kind, meta_bytes, tensor_count, body_bytes)
        size, received = HEADER_BYTES + body_bytes, filled
        shared = flags & FLAG_SHARED
        if shared:
            filled = self._copy_shared(size, filled)
        elif filled < size:
            self._grow(size, filled)
            self._wait_behind(filled)
            return None
        meta = bytes(self._view[HEADER_BYTES : HEADER_BYTES + meta_bytes]) if meta_bytes else b""
        start = HEADER_BYTES + aligned(meta_bytes)
        end = start + DESCRIPTOR_BYTES * tensor_count
        descriptors = bytes(self._view[start:end])
        # If the same descriptors are at the same offset, the views of the last frame are still valid.
        *_, last_end, last_size, last_descriptors, tensors = self._last
        if (end, size, descriptors) != (last_end, last_size, last_descriptors):
            tensors = self._parse_tensors(start, end, size)
        if filled == size:
            self._filled, self.room = 0, self._view
        else:  # more bytes have arrived: the client does not wait for its answers
            self._filled, self.more = filled, filled - size
        repeatable = tensors and not (meta_bytes or status or self.more)
        self._last = (received if repeatable else -1, head, lengths, shared, kind, end, size, descriptors, tensors)
        return Frame(kind, flags, request_id, model_id, arg, status, meta, tensors, stages)

    def _check(
        self, magic: bytes, version: int, kind: int, meta_bytes: int, tensor_count: int, body_bytes: int
    ) -> None:
        """Raise ProtocolError if the header breaks a rule."""
        if magic != MAGIC:
            raise ProtocolError(f"a frame starts with {magic!r}, not {MAGIC!r}: this is not the EdgeRT protocol")
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
                f"a frame has {meta_bytes} bytes of meta and {tensor_count} tensors; at most {META_BYTES_MAX} bytes and "
                f"{TENSORS_MAX} tensors are allowed"
            )
        if aligned(meta_bytes) + DESCRIPTOR_BYTES * tensor_count > body_bytes:
            raise ProtocolError("the lengths in the header contradict each other")

    def _wait_behind(self, filled: int) -> None:
        """Let the rest of a frame arrive behind its first `filled` bytes."""
        self._filled, self.room = filled, self._view[filled:]

    def _grow(self, size: int, filled: int) -> None:
        """Grow the buffer to at least `size` bytes and keep its first `filled` bytes."""
        if size > len(self._view):
            old, new_bytes = self._view, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            self._resizing(len(old), new_bytes)
            self._allocate(new_bytes)
            self._view[:filled] = old[:filled]

    def _copy_shared(self, size: int, filled: int) -> int:
        """Copy the body out of the shared memory and return the new number of bytes in the buffer.

        After the copy, the other end cannot change the checked data. If bytes followed the header on the socket (such
        as a MOVED after an answer), this function copies the bytes behind the body.
        """
        if self.shared is None or size > len(self.shared):
            raise ProtocolError(f"a frame needs {size} bytes of shared memory, which this connection does not have")
        rest = bytes(self._view[HEADER_BYTES:filled])
        self._grow(size + len(rest), HEADER_BYTES)
        self._view[HEADER_BYTES:size] = self.shared[HEADER_BYTES:size]
        self._view[size : size + len(rest)] = rest
        return size + len(rest)

    def _move_to_front(self) -> None:
        """Move the bytes behind the last frame to offset 0. The views of the last frame become invalid."""
        rest, self.more = self.more, 0
        self._view[:rest] = bytes(self._view[self._filled - rest : self._filled])
        self._wait_behind(rest)

    def _parse_tensors(self, start: int, end: int, size: int) -> tuple[WireTensor, ...]:
        """Return the tensors of the descriptors from `start` to `end`. The tensors' data follow, up to `size`."""
        tensors, data = [], end
        for i, at in enumerate(range(start, end, DESCRIPTOR_BYTES)):
            number, code, rank, nbytes, *dims = DESCRIPTOR.unpack_from(self._view, at)
            datatype = DATATYPES_BY_CODE.get(code)
            if datatype is None or rank > MAX_RANK:
                raise ProtocolError(f"tensor {i} has datatype code {code} and rank {rank}, which are not known")
            shape = tuple(dims[:rank])
            if prod(shape) * ITEM_BYTES[datatype] != nbytes:
                expected = prod(shape) * ITEM_BYTES[datatype]
                raise ProtocolError(
                    f"tensor {i} states {nbytes} bytes, but {datatype} {list(shape)} has {expected} bytes"
                )
            if data + nbytes > size:
                raise ProtocolError(f"tensor {i} reaches beyond its frame")
            tensors.append(WireTensor(number, datatype, shape, self._view[data : data + nbytes]))
            data += aligned(nbytes)
        if data != size:
            raise ProtocolError("a frame's body is longer than its parts")
        return tuple(tensors)
