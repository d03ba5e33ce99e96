"""The local protocol's format (docs/protocol.md): the parts of a frame, and how frames are written.

A frame is a 64-byte header, then `meta` (JSON), then one 64-byte descriptor for each tensor, then the tensors' bytes.
Each part is padded with zeros to a multiple of 64. So every tensor is aligned in the receiver's buffer, and can be used
without a copy. All numbers are little-endian.

Between an app and the daemon, the body of a frame may be in memory that both processes map (`FLAG_SHARED`). Then only
the header passes through the socket, and the receiver copies the body before it reads the content. `frame_buffer` reads
frames.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from edgert.errors import EdgeRTError, ProtocolError, by_wire_code
from edgert.tensors import MAX_RANK, NUMPY_NAMES, StageTimes

MAGIC = b"ERT1"
VERSION = 1
ALIGNMENT = 64
HELLO_BYTES_MAX = 4096
META_BYTES_MAX = 1024**2
TENSORS_MAX = 32
AXIS_MAX = 2**32 - 1
FRAME_BYTES_MAX = 64 * 1024**2

HELLO, WELCOME, INFER, RESULT, ERROR, PING, PONG, MOVED, RESUME = range(1, 10)

FLAG_NO_CACHE = 1  # INFER: the engine answers, and the answer is not cached
FLAG_CACHE_HIT = 2  # RESULT: the answer is from the cache
FLAG_SHARED = 4  # INFER, RESULT: the body is in the shared memory that arrived with the WELCOME
FLAG_HIGH_PRIORITY = 8  # INFER: the request runs before other requests that wait for the engine
FLAG_NEAR_HIT = 16  # RESULT, with FLAG_CACHE_HIT: the cached answer belongs to a nearly equal input
FLAG_MANY = 32  # RESULT: other clients also send requests to this model

# magic, version, kind, flags, request id, model id, arg, meta bytes, tensors, status, body bytes, stage times
HEADER = struct.Struct(f"<4sBBHQIIIHHQ{len(StageTimes._fields)}I")
# number, datatype, rank, pad, bytes, eight dimensions
DESCRIPTOR = struct.Struct("<BBB5xQ8I16x")
HEADER_BYTES, DESCRIPTOR_BYTES = HEADER.size, DESCRIPTOR.size

DATATYPE_CODES = {name: code for code, name in enumerate(NUMPY_NAMES, start=1)}
DATATYPES_BY_CODE = {code: name for name, code in DATATYPE_CODES.items()}

_PAD = bytes(ALIGNMENT)
NO_STAGES = StageTimes()
# The fields that differ between frames of one kind and shape: flags, request id, model id, arg; and the stage times.
VARYING, VARYING_OFFSET = struct.Struct("<HQII"), 6
STAGES, STAGES_OFFSET = struct.Struct(f"<{len(StageTimes._fields)}I"), 40
Buffer = bytes | bytearray | memoryview


class WireTensor(NamedTuple):
    """One tensor of a frame; `data` is a view of the connection's buffer."""

    number: int
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


class Frame(NamedTuple):
    """One received frame.

    Attributes:
        arg: The time-out in us (INFER), the batch (RESULT), or retry-after in ms (ERROR).
        tensors: The tuple of the last frame, if this frame has the same descriptors at the same offset. Then arrays
            over these tensors stay valid.
        stages: The header's bytes with the stage times; `stage_times` reads them.
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
        """Return the meta as a JSON object. Raises ProtocolError."""
        try:
            value = json.loads(self.meta) if self.meta else {}
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the frame's meta is not JSON: {type(error).__name__}") from error
        if not isinstance(value, dict):
            raise ProtocolError("the frame's meta is not a JSON object")
        return value


class OutTensor(NamedTuple):
    """A tensor to send: its descriptor and its bytes."""

    descriptor: bytes
    data: Buffer


def aligned(size_bytes: int) -> int:
    """Return the size of a part of a frame, including the padding."""
    return size_bytes + -size_bytes % ALIGNMENT


def descriptor(number: int, datatype: str, shape: Sequence[int], nbytes: int) -> bytes:
    """Return the 64 bytes that describe one tensor. Raises ProtocolError for too many or too long axes."""
    if len(shape) > MAX_RANK:
        raise ProtocolError(f"a tensor has {len(shape)} axes; at most {MAX_RANK} can be sent")
    if max(shape, default=0) > AXIS_MAX:  # only an empty tensor can have such an axis
        raise ProtocolError(f"a tensor has the shape {list(shape)}; an axis may have at most {AXIS_MAX} elements")
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
    stages: Sequence[int] = NO_STAGES,
) -> list[Buffer]:
    """Return the buffers of one frame, in order, for `socket.sendmsg`. Tensor bytes are not copied."""
    parts: list[Buffer] = [b""]
    body = 0
    if meta:
        padded = meta + _PAD[: -len(meta) % ALIGNMENT]
        parts.append(padded)
        body = len(padded)
    if tensors:
        parts.append(tensors[0][0] if len(tensors) == 1 else b"".join(t[0] for t in tensors))
        body += DESCRIPTOR_BYTES * len(tensors)
        for _, data in tensors:
            parts.append(data)
            if padding := _PAD[: -len(data) % ALIGNMENT]:
                parts.append(padding)
            body += len(data) + len(padding)
    parts[0] = HEADER.pack(
        MAGIC, VERSION, kind, flags, request_id, model_id, arg, len(meta), len(tensors), status, body, *stages
    )
    return parts


def share(parts: Sequence[Buffer], area: memoryview) -> bytes | None:
    """Copy the body of a frame into `area` and return the header for a frame with a shared body.

    `parts` are the result of `frame`. Returns None if the body does not fit: then send the frame unchanged.
    """
    at = HEADER_BYTES
    for part in parts[1:]:
        end = at + len(part)
        if end > len(area):
            return None
        area[at:end] = part
        at = end
    header = bytearray(parts[0])
    header[VARYING_OFFSET] |= FLAG_SHARED
    return bytes(header)


def json_frame(kind: int, value: dict[str, Any], *, request_id: int = 0, status: int = 0, arg: int = 0) -> bytes:
    """Return a frame whose only content is a JSON object."""
    return b"".join(frame(kind, request_id=request_id, status=status, arg=arg, meta=json_meta(value)))


def json_meta(value: dict[str, Any]) -> bytes:
    """Return a JSON object as the meta of a frame."""
    return json.dumps(value, separators=(",", ":")).encode()


def resumed(moved: Frame) -> bytes:
    """Return the RESUME frame that passes the session's memory in a MOVED frame to the next worker."""
    tensors = [OutTensor(descriptor(t.number, t.datatype, t.shape, len(t.data)), t.data) for t in moved.tensors]
    return b"".join(frame(RESUME, meta=moved.meta, tensors=tensors))


def error_frame(error: EdgeRTError, *, request_id: int = 0) -> bytes:
    """Return the frame that reports `error` to the other end."""
    retry_after_ms = 0 if error.retry_after_s is None else max(1, round(error.retry_after_s * 1000))
    value = {"code": error.code, "message": error.message, "retryable": error.retryable}
    return json_frame(ERROR, value, request_id=request_id, status=error.wire_code, arg=retry_after_ms)


def error_of(received: Frame) -> EdgeRTError:
    """Return the error that an ERROR frame reports, as an instance of the error's own class."""
    message = str(received.json().get("message", "the daemon gave no reason"))
    return by_wire_code(received.status)(message, retry_after_s=received.arg / 1000 if received.arg else None)


def stage_times(received: Frame) -> StageTimes:
    """Return the stage times in the header of a RESULT."""
    return StageTimes._make(STAGES.unpack(received.stages))
