"""One client's connection in a worker, and the steps of a request.

Two loops serve connections with these steps: `own_thread` and `reactor`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence

from edgert.errors import EdgeRTError, Overloaded, ProtocolError, RequestError
from edgert.log import log
from edgert.protocol import wire
from edgert.protocol.frame_builder import FrameBuilder
from edgert.protocol.local_socket import SEND_BUFFER_BYTES, timeval
from edgert.protocol.sharing import SharedArea, send_with_descriptor
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spans import RequestSpan
from edgert.worker.connections.buffers import FIRST_BUFFER_BYTES, BufferBudget, SpareBuffers
from edgert.worker.connections.sessions import ClientSession
from edgert.worker.pipeline.app_tensors import ModelInputs
from edgert.worker.pipeline.pipeline import Answer, Pipeline

# A client that stops inside a frame for this time is disconnected. A client that is silent between two frames for this
# time loses its large buffer.
STALL_S = 10.0
_STALL = timeval(STALL_S)


class Connection:
    """One client's socket, its buffers, and the steps of a request: read it, encode the answer, count it.

    Args:
        frame_bytes_max: The largest frame of a request or an answer.
        budget: The limit of all buffers. It includes the connection's buffers until `close`.
        spare: The buffers of a connection that has ended; None to create buffers.
    """

    def __init__(
        self,
        sock: socket.socket,
        pipeline: Pipeline,
        counter: SpanCounter,
        frame_bytes_max: int,
        budget: BufferBudget,
        spare: SpareBuffers | None = None,
    ) -> None:
        self.sock = sock
        self._pipeline = pipeline
        self.record = counter.record
        self._frame_bytes_max = frame_bytes_max
        self.budget = budget
        budget.resize(0, FIRST_BUFFER_BYTES)
        self.frames, self.reply, self.tensors, self.inputs = spare or SpareBuffers.new(frame_bytes_max, budget)
        self.area: SharedArea | None = None
        self.session: ClientSession | None = None
        self.turns = 0  # how many requests arrived after an answer to another connection
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _STALL)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _STALL)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def begin(self, session: ClientSession) -> None:
        """Serve the requests of `session`."""
        self.session = session
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(min(STALL_S, session.idle_s)))

    def greet(self, welcome: bytes, shared: tuple[SharedArea, int] | None) -> None:
        """Send the frame `welcome`, with shared memory if `shared` is given; close the descriptor in `shared`."""
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

    def inputs_of(self, request: wire.Frame) -> ModelInputs:
        """Return the inputs of an INFER frame. Raises RequestError if they do not fit the model.

        The next request has the same `inputs` if it has the same `tensors`; then this function need not be called.
        """
        self.inputs = None
        self.inputs = self._pipeline.tensors.read(request.tensors)
        self.tensors = request.tensors
        return self.inputs

    def encode(self, answer: Answer, request: wire.Frame, more_flags: int = 0) -> Sequence[wire.Buffer]:
        """Return the buffers to send, with `more_flags`. Raises RequestError if no frame can hold the answer."""
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

    def count_missed(self, arrived_ns: int) -> None:
        """Count a request, arrived at `arrived_ns`, whose client left or stopped reading before the answer."""
        self.record(RequestSpan("gone", (time.perf_counter_ns() - arrived_ns) // 1000))

    def refuse(self, request: wire.Frame, error: Exception, arrived_ns: int) -> bytes:
        """Return the ERROR frame for a request that arrived at `arrived_ns`, and count the request.

        An error that is not an EdgeRTError is a fault of EdgeRT or the engine, so it is also logged.
        """
        if not isinstance(error, EdgeRTError):
            log(f"{type(error).__name__} in a request: {error}")
            error = EdgeRTError(f"internal error: {type(error).__name__}: {error}")
        took_us = (time.perf_counter_ns() - arrived_ns) // 1000
        self.record(RequestSpan("shed" if isinstance(error, Overloaded) else "error", took_us))
        return wire.error_frame(error, request_id=request.request_id)

    def shrink(self) -> None:
        """Release the memory of a large request, whose views are no longer used."""
        self.tensors = self.inputs = None
        self.frames.shrink()

    def close(self) -> SpareBuffers | None:
        """Release this connection's part of the buffer budget. Return its buffers if they can be reused.

        Buffers with shared memory, with an incomplete frame or of a large size are not reused.
        """
        frames = self.frames
        self.budget.resize(frames.size_bytes, 0)
        if self.area is not None or frames.more or frames.missing() or frames.size_bytes != FIRST_BUFFER_BYTES:
            return None
        return SpareBuffers(frames, self.reply, self.tensors, self.inputs)


def pong(request: wire.Frame) -> bytes:
    """Return the answer to a PING. Raises ProtocolError for any other frame."""
    if request.kind != wire.PING:
        raise ProtocolError(f"frame kind {request.kind} is not for the daemon; send INFER or PING")
    return wire.json_frame(wire.PONG, {}, request_id=request.request_id)
