"""Serves one connection in a thread of its own, which may wait for the client."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from edgert.errors import Moved, ProtocolError, SessionLost
from edgert.protocol import wire
from edgert.worker.connections.connection import STALL_S, Connection, pong
from edgert.worker.connections.reactor_switch import ReactorSwitch
from edgert.worker.pipeline.app_tensors import ModelInputs
from edgert.worker.pipeline.pipeline import Answer, Pipeline


class OwnThread:
    """Serves `connection` with `pipeline` in the thread that calls `serve`.

    `switch` decides when the connection should move to the reactor.
    """

    def __init__(self, connection: Connection, pipeline: Pipeline, switch: ReactorSwitch) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._switch = switch
        self._infer = pipeline.infer if connection.session is None else connection.session.infer
        self._arrived_ns = time.perf_counter_ns()  # the arrival of the last frame

    def serve(self) -> bool:
        """Answer requests until the client has gone or reading stops.

        Returns True, between two frames, if the connection should move to the reactor. Raises ProtocolError,
        SessionLost, OSError, and Moved if another worker serves the model.
        """
        connection, switch, sock = self._connection, self._switch, self._connection.sock
        # The first bytes of a frame may have arrived in the reactor.
        request = self._rest_of_frame() if connection.frames.missing() else self._next_frame()
        inputs: ModelInputs | None
        answer: Answer | None
        parts: Sequence[wire.Buffer] | None
        while request is not None:
            if request.kind != wire.INFER:
                self._handle_other(request)
                request = None  # see below
                request = self._next_frame()
                continue
            arrived_ns = self._arrived_ns
            try:
                inputs = connection.inputs
                if inputs is None or request.tensors is not connection.tensors:
                    inputs = connection.inputs_of(request)
                deadline_s = time.monotonic() + request.arg * 1e-6 if request.arg else None
                answer = self._infer(inputs, request.flags, arrived_ns, deadline_s)
                encoding_ns = time.perf_counter_ns()
                parts = connection.encode(answer, request)
            except Moved:
                raise
            except Exception as error:  # noqa: BLE001  # a request that fails must not end the connection
                sock.sendall(connection.refuse(request, error, arrived_ns))
            else:
                try:
                    if (sock.send(parts[0]) if len(parts) == 1 else sock.sendmsg(parts)) != connection.reply.sent_bytes:
                        raise OSError("the client does not read its answer")
                except OSError:
                    connection.count_missed(arrived_ns)
                    raise
                sent_ns = time.perf_counter_ns()
                total_us, encode_us = (sent_ns - arrived_ns) // 1000, (sent_ns - encoding_ns) // 1000
                connection.record(("ok", total_us, answer.stages, encode_us, answer.batch, answer.flags != 0))
                if switch.last is not connection and switch.count_turn(connection, request):
                    return True
            # A thread that waits must not keep the memory of a large request or answer.
            request = inputs = answer = parts = None
            if connection.budget.scarce:
                connection.shrink()
            request = self._next_frame()
        return False

    def _handle_other(self, frame: wire.Frame) -> None:
        """Handle a frame that is not a request. Raises ProtocolError, SessionLost."""
        session = self._connection.session
        if frame.kind == wire.RESUME and session is not None:
            session.resume(frame)
        else:
            self._connection.sock.sendall(pong(frame))

    def _next_frame(self) -> wire.Frame | None:
        """Return the next frame and note the time of its arrival; None if the client has gone."""
        connection, frames = self._connection, self._connection.frames
        if frames.more:
            request = frames.feed(0)
            self._arrived_ns = time.perf_counter_ns()
            return request or self._rest_of_frame()
        while True:
            try:
                count = connection.sock.recv_into(frames.room)
                break
            except BlockingIOError:  # an idle client may stay, and its thread sleeps
                connection.shrink()
                self._pipeline.release_memory()
                self._wait_until_readable()
        self._arrived_ns = time.perf_counter_ns()
        return (frames.feed(count) or self._rest_of_frame()) if count else None

    def _rest_of_frame(self) -> wire.Frame | None:
        """Return the frame whose first bytes have arrived; None if the client closes inside the frame."""
        sock, frames = self._connection.sock, self._connection.frames
        while True:
            try:
                count = sock.recv_into(frames.room[: frames.missing()], 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise ProtocolError(f"the client stopped inside a frame for {STALL_S:.0f} s") from error
            if not count:
                return None
            request = frames.feed(count)
            if request is not None:
                return request

    def _wait_until_readable(self) -> None:
        """Sleep until bytes arrive or the client closes.

        It polls, because the socket's own time-out applies only to pauses within a frame.

        Raises SessionLost if a session's client sent nothing for too long.
        """
        poll = select.poll()
        poll.register(self._connection.sock, select.POLLIN)
        session = self._connection.session
        if session is None:
            poll.poll()
        elif not poll.poll(max(0.0, session.idle_s - STALL_S) * 1000):
            raise SessionLost(
                f"the session had no request for {session.idle_s:g} s, the limit ([serving] session_idle_s): "
                "start a new session"
            )
