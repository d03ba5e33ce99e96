"""One thread for many connections of a model that answers quickly.

A thread for each connection is the fastest way while few clients ask. But when many ask a model that answers within
microseconds, handing the interpreter from thread to thread costs several times what the engine does. So a worker with
many connections moves them here. The reactor reads every connection that has sent something, runs all these requests
through the engine at once (up to the batcher's cap), and answers them. It waits for no client. Where `RunLimits` says
that a shared run of few requests does not pay, each of them is run and answered by itself.

The code here never blocks. A connection leaves for a thread of its own when few connections are left or the others are
silent, and when its client stops inside a frame, does not take an answer, breaks the protocol, asks with high priority
or in large frames, or ends.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgert.errors import EdgeRTError, Moved, ProtocolError
from edgert.protocol import wire
from edgert.worker.connections.connection import REACTOR_FRAME_BYTES_MAX, Connection, ReactorSwitch, pong
from edgert.worker.pipeline.app_tensors import ModelInputs
from edgert.worker.pipeline.batcher import late
from edgert.worker.pipeline.pipeline import Answer, Pipeline

ALONE_MAX = 256  # turns in which only one connection asks, after which it gets a thread again

_NO_FRAME = wire.Frame(0, 0, 0, 0, 0, 0, b"", (), b"")
_NO_INPUTS = ModelInputs([], 0, False, b"")


class Departure(NamedTuple):
    """A connection that leaves the reactor: the rest of an answer to send, and the error that ends it."""

    unsent: bytes = b""
    error: Exception | None = None


class RunLimits(NamedTuple):
    """How many requests share a run of the engine: `least` or more, `most` at a time."""

    least: int
    most: int


class _Client:
    """A connection and the request that it made last.

    `came_ns` is when the request came, `read_ns` when it was read; `deadline_s` is on time.monotonic.
    """

    __slots__ = ("came_ns", "connection", "deadline_s", "frames", "inputs", "number", "read_ns", "request", "sock")

    def __init__(self, connection: Connection) -> None:
        self.connection, self.sock, self.frames = connection, connection.sock, connection.frames
        self.number = self.sock.fileno()
        self.came_ns = self.read_ns = 0
        self.deadline_s: float | None = None
        self.forget()

    def forget(self) -> None:
        """Drop the last request: its views keep the memory of its frame."""
        self.request, self.inputs = _NO_FRAME, _NO_INPUTS

    def receive(self) -> wire.Frame | Departure | None:
        """Return the next frame, or None if nothing has come. A thread handles an end and half a frame."""
        frames = self.frames
        try:
            if frames.more and (frame := frames.feed(0)) is not None:
                self.came_ns = time.perf_counter_ns()
                return frame
            count = self.sock.recv_into(frames.room, 0, socket.MSG_DONTWAIT)
            self.came_ns = time.perf_counter_ns()
            return Departure() if not count else frames.feed(count) or Departure()
        except BlockingIOError:
            return Departure() if frames.missing() else None
        except (EdgeRTError, OSError) as error:
            return Departure(error=error)

    def read(self, request: wire.Frame) -> None:
        """Read an INFER frame. Raises RequestError if the model does not take it."""
        self.request = request
        self.deadline_s = time.monotonic() + request.arg * 1e-6 if request.arg else None
        self.inputs = self.connection.read(request)
        self.read_ns = time.perf_counter_ns()

    def send(self, parts: Sequence[wire.Buffer], size_bytes: int) -> Departure | None:
        """Send `parts`, of `size_bytes` together; return None if the kernel took all of them."""
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
    """Serves the connections given to `add` with `pipeline`, at most `limits.most` of them in a turn.

    `departs` is called with each connection that leaves, in the reactor's thread: it must not block.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        limits: RunLimits,
        switch: ReactorSwitch,
        departs: Callable[[Connection, Departure], None],
        log: Callable[[str], None],
    ) -> None:
        self._pipeline, self._switch, self._departs, self._log = pipeline, switch, departs, log
        self._least, self._most = limits
        self._clients: dict[int, _Client] = {}
        self._epoll = select.epoll()

    def start(self) -> None:
        """Start the thread; it runs as long as the process."""
        threading.Thread(target=self._serve, name="reactor", daemon=True).start()

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, connection: Connection) -> None:
        """Serve `connection`, all of whose frames are answered. Any thread may call this. Raises OSError."""
        client = _Client(connection)
        self._clients[client.number] = client
        try:
            self._epoll.register(client.number, select.EPOLLIN)
        except OSError:  # the kernel's limit on watched descriptors
            del self._clients[client.number]
            raise

    def _serve(self) -> None:
        poll, clients = self._epoll.poll, self._clients
        more: list[_Client] = []  # clients whose next frame came together with the last one
        alone, turns = -1, 0  # the number of the only client that asked, and for how many turns
        while True:
            ready = [clients[number] for number, _ in poll(0 if more else None)]
            if more:
                ready = list(dict.fromkeys([*more, *ready]))
            for at in range(0, len(ready), self._most):
                turn = ready[at : at + self._most]
                try:
                    self._turn(turn)
                except Exception as error:  # noqa: BLE001  # a fault of ours must not end the thread
                    self._log(f"{type(error).__name__} between requests: {error}")
                    for client in turn:
                        self._leave(client, Departure(error=error))
            more = [client for client in ready if client.frames.more and clients.get(client.number) is client]
            if len(ready) > 1 or ready[0].number != alone:
                alone, turns = ready[0].number if len(ready) == 1 else -1, 0
            elif (turns := turns + 1) >= ALONE_MAX and not more:
                self._leave(ready[0], Departure())
                alone = -1
            ready, turn = [], []  # keep no client that has left while the thread sleeps

    def _turn(self, clients: Sequence[_Client]) -> None:
        """Read each client once, and answer those that have asked."""
        together: list[_Client] = []
        items = 0  # those in `together`
        enough = len(clients) >= self._least
        for client in clients:
            received = client.receive()
            if received is None:
                continue
            if isinstance(received, Departure):
                self._leave(client, received)
            elif received.kind != wire.INFER:
                self._answer_other(client, received)
            elif self._read(client, received):
                high = received.flags & wire.FLAG_HIGH_PRIORITY
                if enough and not high and self._pipeline.is_bare(client.inputs, received.flags):
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

    def _read(self, client: _Client, request: wire.Frame) -> bool:
        try:
            client.read(request)
        except Exception as error:  # noqa: BLE001  # a request that fails must not harm the others
            self._fail(client, error)
            return False
        return True

    def _answer_other(self, client: _Client, request: wire.Frame) -> None:
        try:
            self._send(client, pong(request))
        except ProtocolError as error:
            self._leave(client, Departure(error=error))

    def _answer(self, client: _Client) -> None:
        if self._is_late(client):
            return
        try:
            answer = self._pipeline.infer(client.inputs, client.request.flags, client.came_ns, client.deadline_s)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(client, error)
        else:
            self._deliver(client, answer)

    def _answer_all(self, clients: Sequence[_Client]) -> None:
        """Answer bare requests in one run of the engine."""
        clients = [client for client in clients if not self._is_late(client)]
        if not clients:
            return
        times_ns = [(client.came_ns, client.read_ns) for client in clients]
        deadlines_s = [client.deadline_s for client in clients if client.deadline_s is not None]
        deadline_s = max(deadlines_s) if len(deadlines_s) == len(clients) else None
        try:
            answers = self._pipeline.infer_together([client.inputs for client in clients], times_ns, deadline_s)
        except Exception as error:  # noqa: BLE001  # as above
            for client in clients:
                self._fail(client, error)
        else:
            for client, answer in zip(clients, answers, strict=True):
                self._deliver(client, answer)

    def _is_late(self, client: _Client) -> bool:
        """Return whether the request's time-out passed while others were served; if so, refuse it."""
        if client.deadline_s is None or time.monotonic() < client.deadline_s:
            return False
        self._fail(client, late())
        return True

    def _deliver(self, client: _Client, answer: Answer) -> None:
        connection, began_ns = client.connection, time.perf_counter_ns()
        try:
            parts = connection.encoded(answer, client.request, wire.FLAG_MANY)
        except Exception as error:  # noqa: BLE001  # as above
            self._fail(client, error)
            return
        departure = client.send(parts, connection.reply.sent_bytes)
        if departure is None or departure.unsent:  # a thread sends the rest of it
            connection.answered(answer, client.came_ns, began_ns)
        else:
            connection.missed(client.came_ns)
        if departure is not None:
            self._leave(client, departure)
            return
        self._switch.last = connection
        self._end_turn(client)

    def _fail(self, client: _Client, error: Exception) -> None:
        if isinstance(error, Moved):  # the connection's next thread sends the client away
            self._leave(client, Departure(error=error))
        else:
            self._send(client, client.connection.refusal(client.request, error, client.came_ns))

    def _end_turn(self, client: _Client) -> None:
        """Give the memory of an answered request back, or its client to a thread, if that is due."""
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
        if self._clients.get(client.number) is not client:
            return
        self._epoll.unregister(client.number)
        del self._clients[client.number]
        client.forget()
        self._departs(client.connection, departure)
