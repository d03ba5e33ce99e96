"""One client's connection in a worker: frames in, answers out, in the connection's own thread (or in the reactor's)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from edgert.errors import EdgeRTError, Moved, Overloaded, ProtocolError, RequestError
from edgert.protocol import wire
from edgert.protocol.local_socket import SEND_BUFFER_BYTES, send_all, timeval
from edgert.protocol.sharing import SHARE_BYTES_MIN, SharedArea, send_with_descriptor
from edgert.telemetry.spans import RequestSpan, WindowRecorder
from edgert.worker.pipeline import Asked, Pipeline, Served
from edgert.worker.reply import Reply

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


class Crowd:
    """Whether one thread serves a worker's connections better than each its own does.

    `many` are connected, and they ask in turns: whoever asks and finds that another was the `last` to be answered is
    not alone.
    """

    __slots__ = ("last", "many")

    def __init__(self) -> None:
        self.many = False
        self.last: Connection | None = None


class Connection:
    """Serves `sock` with `pipeline`. What it holds of `budget` it gives back in `close`."""

    def __init__(
        self,
        sock: socket.socket,
        pipeline: Pipeline,
        recorder: WindowRecorder,
        frame_bytes_max: int,
        budget: BufferBudget,
        log: Callable[[str], None],
    ) -> None:
        self.sock, self._pipeline, self._recorder, self._log = sock, pipeline, recorder, log
        self._frame_bytes_max, self._budget = frame_bytes_max, budget
        self.frames = wire.FrameBuffer(frame_bytes_max, FIRST_BUFFER_BYTES, budget.resize)
        budget.resize(0, FIRST_BUFFER_BYTES)
        self._area: SharedArea | None = None
        stall = timeval(STALL_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def greet(self, welcome: bytes, shared_bytes: int) -> None:
        """Send `welcome`, the WELCOME frame, and with it shared memory with halves of `shared_bytes`; 0: the client wants none."""
        made = SharedArea.made(shared_bytes) if shared_bytes else None
        if made is None:
            self.sock.sendall(welcome)
            return
        self._area, descriptor = made
        self.frames.shared = self._area.request
        try:
            send_with_descriptor(self.sock, welcome, descriptor)
        finally:
            os.close(descriptor)

    def serve(self, crowd: Crowd) -> bool:
        """Answer requests until the client is gone or no more are read. Raises ProtocolError, OSError.

        True, between two frames: there is a crowd, and this connection may go on in it. Who asks with high priority
        stays, as only what waits at the batcher can overtake.
        """
        sock, frames, pipeline = self.sock, self.frames, self._pipeline
        recv_into, record, now, clock = sock.recv_into, self._recorder.record, time.perf_counter_ns, time.monotonic
        send, reply, read, infer = sock.send, Reply(), pipeline.read, pipeline.infer
        tensors: tuple[wire.WireTensor, ...] | None = None  # those that `asked` was made of
        asked: Asked | None = None
        first = None  # a frame that had begun to come before
        began_ns = now()
        if frames.missing() and (first := self._rest()) is None:
            return False
        while True:
            request, first = first, None
            if frames.more and request is None:
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
                    return False
                request = frames.feed(count) or self._rest()
                if request is None:
                    return False
            if request.kind != wire.INFER:
                sock.sendall(pong(request))
                continue
            try:
                if asked is None or request.tensors is not tensors:
                    asked = None
                    asked = read(request.tensors)
                    tensors = request.tensors
                deadline_s = clock() + request.arg * 1e-6 if request.arg else None
                outputs, numbers, batch, flags, stages = infer(asked, request.flags, began_ns, deadline_s)
            except Moved:  # whoever holds the connection tells the client where to go
                return False
            except Exception as error:  # noqa: BLE001  # one request must not take the connection along
                self._refuse(request, error, began_ns)
                continue
            encoding_ns = now()
            parts, total = reply.parts(outputs, numbers, request.request_id, flags, batch, stages)
            if total > self._frame_bytes_max:
                self._refuse(request, self._too_large(total), began_ns)
                continue
            if self._area is not None and total >= SHARE_BYTES_MIN:
                send_all(sock, self._through_memory(parts))
            elif (send(parts[0]) if len(parts) == 1 else sock.sendmsg(parts)) != total:
                raise OSError("the client takes no answer")
            sent_ns = now()
            took_us, encode_us = (sent_ns - began_ns) // 1000, (sent_ns - encoding_ns) // 1000
            record(("ok", took_us, *stages, encode_us, batch, flags != 0))
            if len(frames.room) > wire.KEEP_BYTES_MAX:
                tensors = asked = None
                frames.shrink()
            if crowd.last is not self:
                crowd.last = self
                if crowd.many and not frames.more and not request.flags & wire.FLAG_HIGH_PRIORITY:
                    return True

    def encoded(self, reply: Reply, served: Served, request: wire.Frame) -> Sequence[wire.Buffer]:
        """What is to be sent. Raises RequestError where a frame cannot hold it.

        `serve` has this and `answered` without the calls: it is where a lone request is.
        """
        outputs, numbers, batch, flags, stages = served
        parts, total = reply.parts(outputs, numbers, request.request_id, flags, batch, stages)
        if total > self._frame_bytes_max:
            raise self._too_large(total)
        return self._through_memory(parts) if self._area is not None and total >= SHARE_BYTES_MIN else parts

    def answered(self, served: Served, came_ns: int, encoding_ns: int) -> None:
        """Count a request that came at `came_ns` and whose answer, encoded from `encoding_ns` on, has left now."""
        _, _, batch, flags, stages = served
        sent_ns = time.perf_counter_ns()
        took_us, encode_us = (sent_ns - came_ns) // 1000, (sent_ns - encoding_ns) // 1000
        self._recorder.record(("ok", took_us, *stages, encode_us, batch, flags != 0))

    def close(self) -> None:
        """Give the connection's share of the buffers' budget back."""
        self._budget.resize(self.frames.size_bytes, 0)

    def _too_large(self, size_bytes: int) -> RequestError:
        return RequestError(
            f"the answer takes {size_bytes} bytes, a frame at most {self._frame_bytes_max}: ask for fewer items"
        )

    def _rest(self) -> wire.Frame | None:
        """The frame whose beginning has come, or None where the client ends inside it."""
        frames = self.frames
        while True:
            try:
                missing = frames.missing()
                count = self.sock.recv_into(frames.room[:missing], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise ProtocolError(f"the client stopped inside a frame for {STALL_S:.0f} s") from error
            if not count:
                return None
            request = frames.feed(count)
            if request is not None:
                return request

    def _through_memory(self, parts: Sequence[wire.Buffer]) -> Sequence[wire.Buffer]:
        """What is to be sent of an answer whose body lies in the shared memory now; all of it where that has no room."""
        assert self._area is not None
        header = wire.share(parts, self._area.response)
        return parts if header is None else [header]

    def _refuse(self, request: wire.Frame, error: Exception, began_ns: int) -> None:
        self.sock.sendall(self.refusal(request, error, began_ns))

    def refusal(self, request: wire.Frame, error: Exception, began_ns: int) -> bytes:
        """The frame that says so; it is counted, and logged where it is no error of ours."""
        if not isinstance(error, EdgeRTError):
            self._log(f"{type(error).__name__} in a request: {error}")
            error = EdgeRTError(f"internal error: {type(error).__name__}: {error}")
        took_us = (time.perf_counter_ns() - began_ns) // 1000
        self._recorder.record(RequestSpan("shed" if isinstance(error, Overloaded) else "error", took_us))
        return wire.error_frame(error, request_id=request.request_id)


def pong(request: wire.Frame) -> bytes:
    """The answer to what is no INFER. Raises ProtocolError where it is no PING either."""
    if request.kind != wire.PING:
        raise ProtocolError(f"frame kind {request.kind} is not for the daemon; send INFER or PING")
    return wire.json_frame(wire.PONG, {}, request_id=request.request_id)


def _wait_until_readable(sock: socket.socket) -> None:
    """Sleep until bytes, or the end, have come: the socket's own time-out is for pauses inside a frame."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.poll()
