"""The client connections of a worker: their admission, their threads and their end."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
import time

from edgert.errors import EdgeRTError, Moved, Overloaded, ProtocolError
from edgert.log import log
from edgert.protocol import wire
from edgert.protocol.hello import NO_FLAGS, HelloFlags
from edgert.protocol.local_socket import send_all
from edgert.telemetry.span_counter import SpanCounter
from edgert.worker.connections.admission import Admission, Peer
from edgert.worker.connections.buffers import BufferBudget, SpareBuffers
from edgert.worker.connections.connection import Connection
from edgert.worker.connections.own_thread import OwnThread
from edgert.worker.connections.reactor import Departure, Reactor, RunLimits
from edgert.worker.connections.reactor_switch import ReactorSwitch
from edgert.worker.connections.sessions import Sessions
from edgert.worker.connections.shared_memory import SharedMemoryBudget
from edgert.worker.connections.spare_threads import SPARE_MAX, SpareThreads
from edgert.worker.pipeline.pipeline import Pipeline

# The pause before the error frame, so that a client cannot break the protocol more than 40 times a second.
PROTOCOL_ERROR_PAUSE_S = 0.025
MANY_MIN = 2  # the smallest number of connections that are "many" (decision 17)
DRAIN_STEP_S = 0.002
DESCRIPTORS_KEPT = 4  # reserved for the worker: without a free descriptor, the kernel drops a connection
MOVED = wire.json_frame(wire.MOVED, {})


class Connections:
    """Serves clients with `pipeline`. `final_frame` is the last frame for clients that must leave.

    Args:
        app_spans: Counts the requests of apps.
        probe_spans: Counts the requests of checks.
        reactor_limits: The limits of a run in the reactor; None if the model has no reactor.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        app_spans: SpanCounter,
        probe_spans: SpanCounter,
        welcome: bytes,
        frame_bytes_max: int,
        connections_max: int,
        reactor_limits: RunLimits | None,
        shared_memory: SharedMemoryBudget,
        sessions: Sessions,
    ) -> None:
        self._sessions = sessions
        self._pipeline = pipeline
        self._app_spans = app_spans
        self._probe_spans = probe_spans
        self._welcome = welcome
        self._frame_bytes_max = frame_bytes_max
        self._budget = BufferBudget()
        self._shared_memory = shared_memory
        self._lock = threading.Lock()
        self._admission = Admission(connections_max)
        self._switch = ReactorSwitch()
        self._threads = SpareThreads()
        self._spare: list[SpareBuffers] = []  # the buffers of ended connections, for later connections
        self._reactor: Reactor | None = None
        if reactor_limits is not None:
            self._reactor = Reactor(pipeline, reactor_limits, self._switch, self._continue_departed)
        self.final_frame = MOVED
        self._stopping = False

    def __len__(self) -> int:
        return len(self._admission)

    @property
    def in_reactor(self) -> int:
        return 0 if self._reactor is None else len(self._reactor)

    def start(self) -> None:
        if self._reactor is not None:
            self._reactor.start()

    def accept(self, sock: socket.socket, flags: HelloFlags = NO_FLAGS) -> None:
        """Serve `sock`, the socket of a client, in its own thread, or refuse it."""
        reason = "the limit, and no client has more than its share: raise [serving] connections_max"
        has_descriptor = sock.fileno() < resource.getrlimit(resource.RLIMIT_NOFILE)[0] - DESCRIPTORS_KEPT
        if not has_descriptor:
            reason = "and the worker has no free file descriptor: raise LimitNOFILE of the unit, or ulimit -n"
        with self._lock:
            peer = Peer.of(sock)
            if has_descriptor and not self._stopping and self._admission.admit(sock, peer):
                self._set_switch()
                try:
                    self._threads.start(self._serve, sock, peer.uid, flags)
                    return
                except RuntimeError:
                    reason = "and the limit of threads is reached: raise TasksMax of the unit"
                    self._admission.release(sock)
                    self._set_switch()
        error = Overloaded(f"{len(self)} clients are connected, {reason}", retry_after_s=0.5)
        with contextlib.suppress(OSError):
            sock.send(wire.error_frame(error), socket.MSG_DONTWAIT)
        sock.close()

    def stop_reading(self) -> None:
        """Read no more requests; answer the requests that were sent before."""
        with self._lock:
            self._stopping = True
            for sock in self._admission.sockets():
                with contextlib.suppress(OSError):  # the connection's thread reads the earlier bytes, then the end
                    sock.shutdown(socket.SHUT_RD)

    def wait_until_gone(self, timeout_s: float) -> None:
        """Wait until every connection has ended."""
        until = time.monotonic() + timeout_s
        while not self._admission.empty and time.monotonic() < until:
            time.sleep(DRAIN_STEP_S)

    def _serve(self, sock: socket.socket, uid: int, flags: HelloFlags) -> None:
        """Greet and serve one connection. Its thread runs this."""
        connection = None
        try:
            spans = self._probe_spans if flags.probe else self._app_spans
            spare = None
            with contextlib.suppress(IndexError):
                spare = self._spare.pop()
            connection = Connection(sock, self._pipeline, spans, self._frame_bytes_max, self._budget, spare)
            if flags.session:
                connection.begin(self._sessions.open())
            connection.greet(
                self._welcome,
                self._shared_memory.create_area(uid, self._pipeline.tensors.shared_bytes) if flags.shared else None,
            )
        except Exception as error:  # noqa: BLE001  # an internal fault must end only this connection
            _log_fault(error, "before the first request")
            self._end(sock, connection, error)
            return
        self._continue(connection, Departure())

    def _continue(self, connection: Connection, departure: Departure) -> None:
        """Serve a new connection, or one that left the reactor, until it ends or moves to the reactor."""
        error = departure.error
        try:
            if error is None:
                if departure.unsent:
                    connection.sock.sendall(departure.unsent)
                # A session keeps its thread: the reactor's requests are independent.
                switch = self._switch if connection.session is None else ReactorSwitch()
                if OwnThread(connection, self._pipeline, switch).serve():
                    assert self._reactor is not None  # without a reactor, the switch is off
                    self._reactor.add(connection)
                    return
        except Exception as failure:  # noqa: BLE001  # an internal fault must end only this connection
            _log_fault(failure, "between requests")
            error = failure
        self._end(connection.sock, connection, error)

    def _continue_departed(self, connection: Connection, departure: Departure) -> None:
        """Continue a connection that leaves the reactor."""
        if departure.error is not None:
            _log_fault(departure.error, "between requests")
        try:
            self._threads.start(self._continue, connection, departure)
        except RuntimeError as error:  # at the limit of threads; the reactor must not wait for a client
            connection.sock.setblocking(False)
            overloaded = Overloaded(f"no thread can be started: {error}", retry_after_s=0.5)
            cut = OSError("the client has an incomplete answer")
            self._end(connection.sock, connection, cut if departure.unsent else overloaded)

    def _end(self, sock: socket.socket, connection: Connection | None, error: Exception | None) -> None:
        """Tell the client why the connection ends, if there is a reason, and remove the connection."""
        if connection is not None and connection.session is not None:
            self._sessions.release()  # first, because a client that knows the reason may start a session at once
        with contextlib.suppress(OSError):  # the client has gone or does not read
            if error is None or isinstance(error, Moved):
                if self._stopping or self._admission.is_leaving(sock):
                    session = None if connection is None else connection.session
                    moves = self.final_frame is MOVED
                    send_all(sock, session.moved() if session is not None and moves else [self.final_frame])
            elif isinstance(error, EdgeRTError):
                if isinstance(error, ProtocolError):
                    time.sleep(PROTOCOL_ERROR_PAUSE_S)
                sock.sendall(wire.error_frame(error))
        with self._lock:
            self._admission.release(sock)
            self._set_switch()
        if connection is not None:
            if connection.area is not None:
                self._shared_memory.release(connection.area, unread=not _has_closed(sock))
            spare = connection.close()
            if spare is not None and len(self._spare) < SPARE_MAX:
                self._spare.append(spare)
        sock.close()

    def _set_switch(self) -> None:
        """Update the switch for many connections; the caller holds the lock."""
        self._switch.many = self._reactor is not None and len(self._admission) >= MANY_MIN


def _log_fault(error: Exception, when: str) -> None:
    """Log an internal fault. Errors of EdgeRT and of the socket are no internal faults."""
    if not isinstance(error, (EdgeRTError, OSError)):
        log(f"{type(error).__name__} {when}: {error}")


def _has_closed(sock: socket.socket) -> bool:
    """Return whether the client has closed both directions, so that it no longer reads."""
    poll = select.poll()
    poll.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
