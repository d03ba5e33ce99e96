"""One client's connection in a worker, served by its own thread or by the reactor's."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgert.errors import EdgeRTError, Moved, Overloaded, ProtocolError, RequestError, SessionLost
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.protocol.frame_builder import FrameBuilder
from edgert.protocol.local_socket import SEND_BUFFER_BYTES, timeval
from edgert.protocol.sharing import SharedArea, send_with_descriptor
from edgert.telemetry.recorder import WindowRecorder
from edgert.telemetry.spans import RequestSpan
from edgert.worker.connections.sessions import ClientSession
from edgert.worker.pipeline.app_tensors import ModelInputs
from edgert.worker.pipeline.pipeline import Answer, Pipeline

FIRST_BUFFER_BYTES = 8192
BUFFERS_BYTES_MAX = 256 * 1024**2  # the receive buffers of all connections of a worker together
KEPT_SHARE = 1 / 2  # beyond this share of BUFFERS_BYTES_MAX, buffers are released after each answer
REACTOR_FRAME_BYTES_MAX = 1024**2  # a connection with larger frames keeps its own thread, which can wait
# A client that stops inside a frame for this long is disconnected; one that is silent between frames loses its buffer.
STALL_S = 10.0
_STALL = timeval(STALL_S)
# A connection with fewer requests stays out of the reactor, and does not move other connections there: some apps
# connect for each request.
REACTOR_REQUESTS_MIN = 16


class BufferBudget:
    """Limits the receive buffers of all connections of one worker, for all sizes that clients announce.

    A connection keeps its buffer from one frame to the next, unless the budget is `scarce`.
    """

    def __init__(self, size_bytes_max: int = BUFFERS_BYTES_MAX) -> None:
        self._left_bytes = size_bytes_max
        self._scarce_bytes = size_bytes_max * (1 - KEPT_SHARE)
        self.scarce = False
        self._lock = threading.Lock()

    def resize(self, old_bytes: int, new_bytes: int) -> None:
        """Count a buffer before it changes its size. Raises Overloaded if too little is left."""
        with self._lock:
            if new_bytes - old_bytes > self._left_bytes:
                raise Overloaded("the requests of all clients fill the daemon's buffers; try again", retry_after_s=0.2)
            self._left_bytes += old_bytes - new_bytes
            self.scarce = self._left_bytes < self._scarce_bytes


class ReactorSwitch:
    """Tells when connections should move to the reactor: there are many, and they take turns.

    A connection takes turns with others if another connection got the `last` answer before its request. Connections
    that ended after a few requests do not count.
    """

    __slots__ = ("last", "many")

    def __init__(self) -> None:
        self.many = False
        self.last: Connection | None = None


class SpareBuffers(NamedTuple):
    """The buffers of a connection that has ended, for the next connection.

    Two clients often send frames of the same form, so the arrays of the last request's tensors stay with the buffers.
    """

    frames: FrameBuffer
    reply: FrameBuilder
    tensors: tuple[wire.WireTensor, ...] | None = None  # the source of `inputs`
    inputs: ModelInputs | None = None


class Connection:
    """Serves `sock` with `pipeline`. Its buffers count towards `budget` until `close`.

    It takes over `spare` buffers of a connection that has ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        pipeline: Pipeline,
        recorder: WindowRecorder,
        frame_bytes_max: int,
        budget: BufferBudget,
        log: Callable[[str], None],
        spare: SpareBuffers | None = None,
    ) -> None:
        self.sock, self._pipeline, self._record, self._log = sock, pipeline, recorder.record, log
        self._frame_bytes_max, self.budget = frame_bytes_max, budget
        budget.resize(0, FIRST_BUFFER_BYTES)
        if spare is None:
            spare = SpareBuffers(
                FrameBuffer(frame_bytes_max, FIRST_BUFFER_BYTES, budget.resize), FrameBuilder(wire.RESULT)
            )
        self.frames, self.reply, self._tensors, self._inputs = spare
        self.area: SharedArea | None = None
        self.session: ClientSession | None = None
        self._after_others = 0  # the requests that arrived after an answer to another connection
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _STALL)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _STALL)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def begin(self, session: ClientSession) -> None:
        """Serve the requests of `session`."""
        self.session = session
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(min(STALL_S, session.idle_s)))

    def greet(self, welcome: bytes, shared: tuple[SharedArea, int] | None) -> None:
        """Send the frame `welcome`, with shared memory if `shared` is given; close its descriptor."""
        if shared is None:
            self.sock.sendall(welcome)
            return
        area, descriptor = shared
        self.area = area
        self.frames.shared = area.request
        self.reply = FrameBuilder(wire.RESULT, shared=area.response)
        try:
            send_with_descriptor(self.sock, welcome, descriptor)
        finally:
            os.close(descriptor)

    def serve(self, switch: ReactorSwitch) -> bool:
        """Answer requests until the client has gone or reading stops. Raises ProtocolError, OSError.

        Returns True, between two frames, if the connection should move to the reactor. A high-priority client keeps
        its thread: only requests queued in the batcher can be reordered. A client of large frames also keeps its
        thread.
        """
        sock, frames, budget, infer, clock, now = (
            self.sock,
            self.frames,
            self.budget,
            self._pipeline.infer if self.session is None else self.session.infer,
            time.monotonic,
            time.perf_counter_ns,
        )
        first = None  # a frame whose first bytes arrived in the reactor
        began_ns = now()
        if frames.missing() and (first := self._rest_of_frame()) is None:
            return False
        while True:
            if budget.scarce:
                self.shrink()
            request, first = first, None
            if frames.more and request is None:
                request = frames.feed(0)
                began_ns = now()
            if request is None:
                try:
                    count = sock.recv_into(frames.room)
                except BlockingIOError:  # an idle client may stay, and its thread sleeps
                    self.shrink()
                    self._pipeline.release_memory()
                    self._wait_until_readable()
                    continue
                began_ns = now()
                if not count:
                    return False
                request = frames.feed(count) or self._rest_of_frame()
                if request is None:
                    return False
            if request.kind != wire.INFER:
                self._handle_other(request)
                continue
            try:
                deadline_s = clock() + request.arg * 1e-6 if request.arg else None
                answer = infer(self.read(request), request.flags, began_ns, deadline_s)
                encoding_ns = now()
                parts = self.encoded(answer, request)
            except Moved:  # the caller tells the client to move
                return False
            except Exception as error:  # noqa: BLE001  # a request that fails must not end the connection
                sock.sendall(self.refusal(request, error, began_ns))
                continue
            try:
                if (sock.send(parts[0]) if len(parts) == 1 else sock.sendmsg(parts)) != self.reply.sent_bytes:
                    raise OSError("the client does not read its answer")
            except OSError:
                self.missed(began_ns)
                raise
            self.answered(answer, began_ns, encoding_ns)
            if switch.last is not self:
                self._after_others += 1
                if self._after_others >= REACTOR_REQUESTS_MIN:
                    switch.last = self
                    if switch.many and self._suits_reactor(request):
                        return True

    def read(self, request: wire.Frame) -> ModelInputs:
        """Return the inputs of an INFER frame. Raises RequestError if they do not fit the model."""
        if self._inputs is None or request.tensors is not self._tensors:
            self._inputs = None
            self._inputs = self._pipeline.tensors.read(request.tensors)
            self._tensors = request.tensors
        return self._inputs

    def encoded(self, answer: Answer, request: wire.Frame, more_flags: int = 0) -> Sequence[wire.Buffer]:
        """Return the buffers to send, with `more_flags` in the header.

        Raises RequestError if a frame cannot hold the answer.
        """
        outputs, numbers, batch, flags, stages = answer
        reply = self.reply
        parts = reply.parts(outputs, numbers, flags | more_flags, request.request_id, batch, stages)
        if reply.frame_bytes > self._frame_bytes_max:
            if self.session is not None:
                self.session.undo()
            raise RequestError(
                f"the answer has {reply.frame_bytes} bytes; a frame may have {self._frame_bytes_max}: send fewer items"
            )
        return parts

    def answered(self, answer: Answer, came_ns: int, encoding_ns: int) -> None:
        """Count a request of `came_ns`. Its answer, encoded from `encoding_ns` on, was just sent."""
        _, _, batch, flags, stages = answer
        sent_ns = time.perf_counter_ns()
        self._record(("ok", (sent_ns - came_ns) // 1000, stages, (sent_ns - encoding_ns) // 1000, batch, flags != 0))

    def missed(self, came_ns: int) -> None:
        """Count a request that arrived at `came_ns`; its client left or stopped reading before the answer."""
        self._record(RequestSpan("gone", (time.perf_counter_ns() - came_ns) // 1000))

    def refusal(self, request: wire.Frame, error: Exception, came_ns: int) -> bytes:
        """Return the ERROR frame for a request; count it, and log an error that is not an EdgeRTError."""
        if not isinstance(error, EdgeRTError):
            self._log(f"{type(error).__name__} in a request: {error}")
            error = EdgeRTError(f"internal error: {type(error).__name__}: {error}")
        took_us = (time.perf_counter_ns() - came_ns) // 1000
        self._record(RequestSpan("shed" if isinstance(error, Overloaded) else "error", took_us))
        return wire.error_frame(error, request_id=request.request_id)

    def shrink(self) -> None:
        """Release the memory of a large request, whose views are no longer used."""
        self._tensors = self._inputs = None
        self.frames.shrink()

    def close(self) -> SpareBuffers | None:
        """Release this connection's part of the buffer budget. Return its buffers, if they can be reused.

        The next connection gets no buffers with shared memory, with an incomplete frame or of a large size.
        """
        frames = self.frames
        self.budget.resize(frames.size_bytes, 0)
        if self.area is not None or frames.more or frames.missing() or frames.size_bytes != FIRST_BUFFER_BYTES:
            return None
        return SpareBuffers(frames, self.reply, self._tensors, self._inputs)

    def _suits_reactor(self, request: wire.Frame) -> bool:
        """Return whether the reactor may read the next frame after `request`."""
        high = request.flags & wire.FLAG_HIGH_PRIORITY
        return not (self.frames.more or high or self.frames.size_bytes > REACTOR_FRAME_BYTES_MAX)

    def _handle_other(self, frame: wire.Frame) -> None:
        """Handle a frame that is not a request. Raises ProtocolError, SessionLost."""
        if frame.kind == wire.RESUME and self.session is not None:
            self.session.resume(frame)
        else:
            self.sock.sendall(pong(frame))

    def _wait_until_readable(self) -> None:
        """Sleep until bytes arrive or the client closes. The socket's own time-out is for pauses in a frame.

        Raises SessionLost if a session's client sent nothing for too long.
        """
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        if self.session is None:
            poll.poll()
            return
        idle_s = self.session.idle_s
        if not poll.poll(max(0.0, idle_s - STALL_S) * 1000):
            raise SessionLost(
                f"the session had no request for {idle_s:g} s, the limit ([serving] session_idle_s): start a new session"
            )

    def _rest_of_frame(self) -> wire.Frame | None:
        """Return the frame whose first bytes have arrived, or None if the client closes inside it."""
        frames = self.frames
        while True:
            try:
                count = self.sock.recv_into(frames.room[: frames.missing()], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise ProtocolError(f"the client stopped inside a frame for {STALL_S:.0f} s") from error
            if not count:
                return None
            request = frames.feed(count)
            if request is not None:
                return request


def pong(request: wire.Frame) -> bytes:
    """Return the answer to a PING. Raises ProtocolError for any other frame."""
    if request.kind != wire.PING:
        raise ProtocolError(f"frame kind {request.kind} is not for the daemon; send INFER or PING")
    return wire.json_frame(wire.PONG, {}, request_id=request.request_id)
