"""Few threads for many connections of a model that answers quickly.

With few clients, a thread for each connection is fastest. With many clients of a model that answers within
microseconds, switching the interpreter between threads takes several times as long as the engine. So a worker moves its
connections to the reactor if there are many. The reactor has two forms, which `RunLimits` selects:

- Requests share runs of the engine. One thread reads every connection that has sent something, runs all these requests
  at once (up to the batcher's cap), and answers them. If there are too few requests for a shared run to be faster, the
  thread runs and answers each request by itself.
- Each request has its own run. There is one thread for each parallel run, and the threads take the requests in order of
  arrival. A thread reads a request just before its run, so the input is still in the processor's cache. The same thread
  answers the request just after the run.

While the threads are busy, none of them sees a request arrive. The request arrived between two polls, so the middle
between the polls is taken as its arrival. This estimate is wrong by at most half a turn, and right on average.

The reactor never waits for a client. A connection moves to a thread of its own when few connections are left, or when
the other connections are silent. It also moves when its client stops inside a frame, does not read an answer, breaks
the protocol, uses high priority or large frames, or ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgert.errors import EdgeRTError, Moved, ProtocolError
from edgert.protocol import wire
from edgert.worker.connections.connection import Connection, pong
from edgert.worker.connections.reactor_switch import REACTOR_FRAME_BYTES_MAX, ReactorSwitch
from edgert.worker.pipeline.app_tensors import ModelInputs
from edgert.worker.pipeline.batcher import late_error
from edgert.worker.pipeline.pipeline import Answer, Pipeline

SLEEP_NS_MIN = 20_000  # a poll that takes less time found requests at once
TURNS_IN_ROW_MAX = 256  # after this number of requests in a row, a connection gets its own thread again

_NO_FRAME = wire.Frame(0, 0, 0, 0, 0, 0, b"", (), b"")
_NO_INPUTS = ModelInputs([], 0, False, b"")


class Departure(NamedTuple):
    """The rest of an answer to send when a connection leaves the reactor, and the error that ends it."""

    unsent: bytes = b""
    error: Exception | None = None


class RunLimits(NamedTuple):
    """The number of requests that share a run of the engine.

    Attributes:
        least: The smallest number of requests that share a run; fewer requests run one by one.
        most: The largest number of items in a run; 1 if each request has its own run.
        threads: The number of parallel runs, if the requests run one by one.
    """

    least: int
    most: int
    threads: int = 1


class _Client:
    """A connection, and its last request.

    Attributes:
        arrived_ns: The estimated arrival of the request.
        received_ns: The time when the request was received from the kernel.
        read_ns: The time when the request was decoded.
        waited_ns: The time that the request waited in the kernel.
        deadline_s: The time at which the request's time-out passes, on time.monotonic.
    """

    __slots__ = (
        "arrived_ns", "connection", "deadline_s", "descriptor", "frames", "inputs", "read_ns", "received_ns", "request", "sock",
        "waited_ns",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sock = connection.sock
        self.frames = connection.frames
        self.descriptor = self.sock.fileno()
        self.arrived_ns = self.received_ns = self.read_ns = self.waited_ns = 0
        self.deadline_s: float | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the last request, because its views keep the memory of its frame."""
        self.request, self.inputs = _NO_FRAME, _NO_INPUTS

    def receive(self) -> wire.Frame | Departure | None:
        """Return the next frame, None if no frame has arrived, or a Departure if the client closed or stopped."""
        frames = self.frames
        try:
            if frames.more and (frame := frames.feed(0)) is not None:
                self.received_ns = time.perf_counter_ns()
                return frame
            count = self.sock.recv_into(frames.room, 0, socket.MSG_DONTWAIT)
            self.received_ns = time.perf_counter_ns()
            return Departure() if not count else frames.feed(count) or Departure()
        except BlockingIOError:
            return Departure() if frames.missing() else None
        except (EdgeRTError, OSError) as error:
            return Departure(error=error)

    def read(self, request: wire.Frame) -> None:
        """Decode an INFER frame. Raises RequestError if the frame does not fit the model."""
        self.request = request
        self.waited_ns = waited_ns = self.received_ns - self.arrived_ns
        self.deadline_s = time.monotonic() + request.arg * 1e-6 - waited_ns * 1e-9 if request.arg else None
        inputs = self.connection.inputs
        if inputs is None or request.tensors is not self.connection.tensors:
            inputs = self.connection.inputs_of(request)
        self.inputs = inputs
        self.read_ns = time.perf_counter_ns()

    def send(self, parts: Sequence[wire.Buffer], size_bytes: int) -> Departure | None:
        """Send `parts`, of `size_bytes` together; return None if the kernel took all bytes."""
        try:
            if len(parts) == 1:
                sent = self.sock.send(parts[0], socket.MSG_DONTWAIT)
            else:
                sent = self.sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return Departure(error=error)
        return None if sent == size_bytes else Departure(unsent=b"".join(parts)[sent:])


class Reactor:
    """Serves the connections given to `add`.

    Args:
        limits: The number of requests that share a run, and the number of threads that run them.
        switch: Tells whether there are still many connections.
        on_departure: Called in the reactor's thread with each connection that leaves; it must not block.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        limits: RunLimits,
        switch: ReactorSwitch,
        on_departure: Callable[[Connection, Departure], None],
    ) -> None:
        self._pipeline = pipeline
        self._switch = switch
        self._on_departure = on_departure
        self._least = limits.least
        self._most = limits.most
        self._threads = limits.threads
        self._one_by_one = limits.most == 1
        self._clients: dict[int, _Client] = {}
        self._epoll = select.epoll()
        # If there are several threads, only the thread that serves a connection may get its events.
        self._events = select.EPOLLIN | select.EPOLLONESHOT if self._one_by_one else select.EPOLLIN
        self._waiting: deque[_Client] = deque()  # clients whose requests wait for a thread
        self._sleeping: list[None] = []  # one entry for each thread that waits for requests
        self._polled_ns = time.perf_counter_ns()  # the time of the last poll by any thread
        self._last_descriptor = -1  # the last client's
        self._turns_in_row = 0  # of this client

    def start(self) -> None:
        """Start the threads; they run as long as the process."""
        serve = self._serve_one_by_one if self._one_by_one else self._serve
        for _ in range(self._threads):
            threading.Thread(target=serve, name="reactor", daemon=True).start()

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, connection: Connection) -> None:
        """Serve `connection`, which has no unanswered frame. Any thread may call this. Raises OSError."""
        client = _Client(connection)
        self._clients[client.descriptor] = client
        try:
            self._epoll.register(client.descriptor, self._events)
        except OSError:  # the kernel's limit on watched descriptors
            del self._clients[client.descriptor]
            raise

    def _serve(self) -> None:
        """Serve requests that share runs. One thread runs this."""
        poll, clients, clock_ns = self._epoll.poll, self._clients, time.perf_counter_ns
        more: list[_Client] = []  # clients whose next frame came together with their last frame
        while True:
            began_ns = clock_ns()
            ready = [clients[descriptor] for descriptor, _ in poll(0 if more else None)]
            now_ns = clock_ns()
            slept = now_ns - began_ns > SLEEP_NS_MIN
            arrived_ns = now_ns if slept else (self._polled_ns + now_ns) // 2
            self._polled_ns = now_ns
            if more:
                ready = list(dict.fromkeys([*more, *ready]))
            for client in ready:
                client.arrived_ns = arrived_ns
            for at in range(0, len(ready), self._most):
                turn = ready[at : at + self._most]
                try:
                    self._turn(turn)
                except Exception as error:  # noqa: BLE001  # a fault of ours must not end the thread
                    for client in turn:
                        self._leave(client, Departure(error=error))
            more = [client for client in ready if client.frames.more and clients.get(client.descriptor) is client]
            if len(ready) > 1:
                self._last_descriptor = -1
            elif self._is_lone(ready[0]) and not more:
                self._leave(ready[0], Departure())
            # A sleeping thread must not hold a reference to a client that has left.
            ready, turn = [], []

    def _serve_one_by_one(self) -> None:
        """Serve requests that each have a run of their own. Several threads run this."""
        while True:
            client = self._next()
            try:
                self._turn((client,))
                if self._clients.get(client.descriptor) is client:
                    self._await_next(client)
            except Exception as error:  # noqa: BLE001  # a fault of ours must not end the thread
                self._leave(client, Departure(error=error))
            del client  # a sleeping thread must not hold a reference to a client that has left

    def _next(self) -> _Client:
        """Return the client whose request has waited longest; sleep until a request arrives."""
        poll, clients, waiting, sleeping = self._epoll.poll, self._clients, self._waiting, self._sleeping
        while True:
            # A second request wakes a sleeping thread: leave that request to that thread.
            found = poll(0, 1 if sleeping else -1)
            arrived_ns = now_ns = time.perf_counter_ns()
            if not found and not waiting:
                sleeping.append(None)
                found = poll(None, 1)
                sleeping.pop()
                arrived_ns = now_ns = time.perf_counter_ns()
            elif not sleeping:
                arrived_ns = (self._polled_ns + now_ns) // 2
            self._polled_ns = now_ns
            for descriptor, _ in found:
                client = clients[descriptor]
                client.arrived_ns = arrived_ns
                waiting.append(client)
            with contextlib.suppress(IndexError):  # another thread took the request
                return waiting.popleft()

    def _await_next(self, client: _Client) -> None:
        """Wait for the next request of a client whose last request is answered."""
        if client.frames.more:
            client.arrived_ns = time.perf_counter_ns()
            self._waiting.append(client)
        elif self._is_lone(client):
            self._leave(client, Departure())
        else:
            self._epoll.modify(client.descriptor, self._events)

    def _is_lone(self, client: _Client) -> bool:
        """Return whether all of the last TURNS_IN_ROW_MAX requests came from this client."""
        if client.descriptor != self._last_descriptor:
            self._last_descriptor, self._turns_in_row = client.descriptor, 0
            return False
        self._turns_in_row += 1
        if self._turns_in_row < TURNS_IN_ROW_MAX:
            return False
        self._last_descriptor = -1
        return True

    def _turn(self, clients: Sequence[_Client]) -> None:
        """Read each client once and answer the clients that have sent a request."""
        together: list[_Client] = []
        items = 0  # the number of items in `together`
        enough = len(clients) >= self._least
        for client in clients:
            received = client.receive()
            if received is None:
                continue
            if isinstance(received, Departure):
                self._leave(client, received)
                continue
            if received.kind != wire.INFER:
                self._answer_other(client, received)
                continue
            try:
                client.read(received)
            except Exception as error:  # noqa: BLE001  # a request that fails must not harm the others
                self._fail(client, error)
                continue
            high = received.flags & wire.FLAG_HIGH_PRIORITY
            if enough and not high and self._pipeline.needs_only_engine(client.inputs, received.flags):
                if together and items + client.inputs.items > self._most:
                    self._answer_all(together)
                    together, items = [], 0
                together.append(client)
                items += client.inputs.items
            else:
                self._answer(client)
                if high:  # only requests queued in the batcher can be reordered
                    self._leave(client, Departure())
        if together:
            self._answer_all(together)

    def _answer_other(self, client: _Client, request: wire.Frame) -> None:
        try:
            self._send(client, pong(request))
        except ProtocolError as error:
            self._leave(client, Departure(error=error))

    def _answer(self, client: _Client) -> None:
        if client.deadline_s is not None and time.monotonic() >= client.deadline_s:
            self._fail(client, late_error())
            return
        try:
            answer = self._pipeline.infer(
                client.inputs,
                client.request.flags,
                client.arrived_ns,
                client.deadline_s,
                client.waited_ns,
                in_reactor=True,
            )
        except Exception as error:  # noqa: BLE001  # a request that fails must not harm the others
            self._fail(client, error)
        else:
            self._deliver(client, answer)

    def _answer_all(self, clients: Sequence[_Client]) -> None:
        """Answer requests that need only the engine, in one run."""
        now_s = time.monotonic()
        if too_late := [each for each in clients if each.deadline_s is not None and now_s >= each.deadline_s]:
            for client in too_late:
                self._fail(client, late_error())
            clients = [each for each in clients if each not in too_late]
            if not clients:
                return
        times_ns = [(client.arrived_ns, client.received_ns, client.read_ns) for client in clients]
        deadlines_s = [client.deadline_s for client in clients if client.deadline_s is not None]
        deadline_s = max(deadlines_s) if len(deadlines_s) == len(clients) else None
        try:
            answers = self._pipeline.infer_together([client.inputs for client in clients], times_ns, deadline_s)
        except Exception as error:  # noqa: BLE001  # a request that fails must not harm the others
            for client in clients:
                self._fail(client, error)
        else:
            for client, answer in zip(clients, answers, strict=True):
                self._deliver(client, answer)

    def _deliver(self, client: _Client, answer: Answer) -> None:
        connection, began_ns = client.connection, time.perf_counter_ns()
        try:
            parts = connection.encode(answer, client.request, wire.FLAG_MANY)
        except Exception as error:  # noqa: BLE001  # a request that fails must not harm the others
            self._fail(client, error)
            return
        departure = client.send(parts, connection.reply.sent_bytes)
        if departure is None or departure.unsent:  # a thread sends the rest
            sent_ns = time.perf_counter_ns()
            total_us, encode_us = (sent_ns - client.arrived_ns) // 1000, (sent_ns - began_ns) // 1000
            connection.record(("ok", total_us, answer.stages, encode_us, answer.batch, answer.flags != 0))
        else:
            connection.count_missed(client.arrived_ns)
        if departure is not None:
            self._leave(client, departure)
            return
        self._switch.last = connection
        if connection.budget.scarce or not self._switch.many or client.frames.size_bytes > REACTOR_FRAME_BYTES_MAX:
            self._end_turn(client)

    def _fail(self, client: _Client, error: Exception) -> None:
        if isinstance(error, Moved):  # the connection's next thread tells the client to move
            self._leave(client, Departure(error=error))
        else:
            self._send(client, client.connection.refuse(client.request, error, client.arrived_ns))

    def _end_turn(self, client: _Client) -> None:
        """After an answer, release memory if it is scarce, and let a client leave that must leave."""
        if client.connection.budget.scarce:
            client.forget()
            client.connection.shrink()
        if not self._switch.many or client.frames.size_bytes > REACTOR_FRAME_BYTES_MAX:
            self._leave(client, Departure())

    def _send(self, client: _Client, frame: bytes) -> None:
        if (departure := client.send((frame,), len(frame))) is not None:
            self._leave(client, departure)
        else:
            self._end_turn(client)

    def _leave(self, client: _Client, departure: Departure) -> None:
        if self._clients.get(client.descriptor) is not client:
            return
        with contextlib.suppress(OSError):  # the kernel has removed a closed socket from the epoll
            self._epoll.unregister(client.descriptor)
        del self._clients[client.descriptor]
        client.forget()
        self._on_departure(client.connection, departure)
