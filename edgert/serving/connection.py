"""One client's connection in a worker: frames in, answers out, in the connection's own thread."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from edgert import wire
from edgert.errors import EdgeRTError, Moved, Overloaded, ProtocolError, RequestError
from edgert.local_socket import SEND_BUFFER_BYTES, send_all, timeval
from edgert.serving.pipeline import Asked, Pipeline
from edgert.serving.reply import Reply
from edgert.sharing import SHARE_BYTES_MIN, SharedArea, send_with_descriptor
from edgert.telemetry.spans import RequestSpan, WindowRecorder

FIRST_BUFFER_BYTES = 8192
BUFFERS_BYTES_MAX = 256 * 1024**2  # what all connections of a worker may hold for frames that are on their way
STALL_S = 10.0  # a client that stops in the middle of a frame for this long is cut off


class BufferBudget:
    """Bounds what the connections of one worker hold in receive buffers, whatever their clients announce."""

    def __init__(self, size_bytes_max: int = BUFFERS_BYTES_MAX) -> None:
        self._left_bytes = size_bytes_max
        self._lock = threading.Lock()

    def resize(self, old_bytes: int, new_bytes: int) -> None:
        """A buffer is about to change its size. Raises Overloaded where there is no room for it."""
        with self._lock:
            if new_bytes - old_bytes > self._left_bytes:
                raise Overloaded("the frames on their way fill the daemon's buffers; send it again", retry_after_s=0.2)
            self._left_bytes += old_bytes - new_bytes


class Connection:
    """Serves `sock` with `pipeline`. `welcome` is the WELCOME frame.

    `shared_bytes` is how large each half of the shared memory is to be; 0 where the client wants none.
    """

    def __init__(
        self,
        sock: socket.socket,
        pipeline: Pipeline,
        recorder: WindowRecorder,
        welcome: bytes,
        frame_bytes_max: int,
        shared_bytes: int,
        budget: BufferBudget,
        log: Callable[[str], None],
    ) -> None:
        self._sock, self._pipeline, self._recorder, self._log = sock, pipeline, recorder, log
        self._frame_bytes_max, self._budget = frame_bytes_max, budget
        self._frames = wire.FrameBuffer(frame_bytes_max, FIRST_BUFFER_BYTES, budget.resize)
        budget.resize(0, FIRST_BUFFER_BYTES)
        self._area: SharedArea | None = None
        stall = timeval(STALL_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._greet(welcome, shared_bytes)

    def serve(self) -> None:
        """Answer requests until the client is gone or no more are read. Raises ProtocolError, OSError."""
        sock, frames, pipeline = self._sock, self._frames, self._pipeline
        recv_into, record, now, clock = sock.recv_into, self._recorder.record, time.perf_counter_ns, time.monotonic
        send, reply, read, infer = sock.send, Reply(), pipeline.read, pipeline.infer
        tensors: tuple[wire.WireTensor, ...] | None = None  # those that `asked` was made of
        asked: Asked | None = None
        while True:
            request = None
            if frames.more:
                request = frames.feed(0)
                began_ns = now()
            if request is None:
                try:
                    count = recv_into(frames.room)
                except BlockingIOError:  # an idle client may stay as long as it likes, and wakes nobody
                    _wait_until_readable(sock)
                    continue
                began_ns = now()
                if not count:
                    return
                request = frames.feed(count) or self._rest()
                if request is None:
                    return
            if request.kind != wire.INFER:
                self._other(request)
                continue
            try:
                if asked is None or request.tensors is not tensors:
                    asked = None
                    asked = read(request.tensors)
                    tensors = request.tensors
                deadline_s = clock() + request.arg * 1e-6 if request.arg else None
                outputs, numbers, batch, flags, stages = infer(asked, request.flags, began_ns, deadline_s)
            except Moved:  # whoever holds the connection tells the client where to go
                return
            except EdgeRTError as error:
                self._refuse(request, error, began_ns)
                continue
            except Exception as error:  # noqa: BLE001  # one request must not take the connection along
                self._log(f"{type(error).__name__} in a request: {error}")
                self._refuse(request, EdgeRTError(f"internal error: {type(error).__name__}: {error}"), began_ns)
                continue
            encoding_ns = now()
            parts, total = reply.parts(outputs, numbers, request.request_id, flags, batch, stages)
            if total > self._frame_bytes_max:
                self._refuse(request, self._too_large(total), began_ns)
                continue
            if self._area is not None and total >= SHARE_BYTES_MIN:
                self._send_shared(parts)
            elif (send(parts[0]) if len(parts) == 1 else sock.sendmsg(parts)) != total:
                raise OSError("the client takes no answer")
            sent_ns = now()
            took_us, encode_us = (sent_ns - began_ns) // 1000, (sent_ns - encoding_ns) // 1000
            record(("ok", took_us, *stages, encode_us, batch, flags != 0))
            if len(frames.room) > wire.KEEP_BYTES_MAX:
                tensors = asked = None
                frames.shrink()

    def close(self) -> None:
        """Give the connection's share of the buffers' budget back."""
        self._budget.resize(self._frames.size_bytes, 0)

    def _too_large(self, size_bytes: int) -> RequestError:
        return RequestError(
            f"the answer takes {size_bytes} bytes, a frame at most {self._frame_bytes_max}: ask for fewer items"
        )

    def _greet(self, welcome: bytes, shared_bytes: int) -> None:
        made = SharedArea.made(shared_bytes) if shared_bytes else None
        if made is None:
            self._sock.sendall(welcome)
            return
        self._area, descriptor = made
        self._frames.shared = self._area.request
        try:
            send_with_descriptor(self._sock, welcome, descriptor)
        finally:
            os.close(descriptor)

    def _rest(self) -> wire.Frame | None:
        """The frame whose beginning has come, or None where the client ends inside it."""
        frames = self._frames
        while True:
            try:
                missing = frames.missing()
                count = self._sock.recv_into(frames.room[:missing], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise ProtocolError(f"the client stopped inside a frame for {STALL_S:.0f} s") from error
            if not count:
                return None
            request = frames.feed(count)
            if request is not None:
                return request

    def _other(self, request: wire.Frame) -> None:
        if request.kind != wire.PING:
            raise ProtocolError(f"frame kind {request.kind} is not for the daemon; send INFER or PING")
        self._sock.sendall(wire.json_frame(wire.PONG, {}, request_id=request.request_id))

    def _send_shared(self, parts: Sequence[wire.Buffer]) -> None:
        assert self._area is not None
        header = wire.share(parts, self._area.response)
        send_all(self._sock, parts if header is None else [header])

    def _refuse(self, request: wire.Frame, error: EdgeRTError, began_ns: int) -> None:
        took_us = (time.perf_counter_ns() - began_ns) // 1000
        self._recorder.record(RequestSpan("shed" if isinstance(error, Overloaded) else "error", took_us))
        self._sock.sendall(wire.error_frame(error, request_id=request.request_id))


def _wait_until_readable(sock: socket.socket) -> None:
    """Sleep until bytes, or the end, have come: the socket's own time-out is for pauses inside a frame."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.poll()
