"""One thread for the connections of a model that answers quickly, where they are many.

A thread a connection is the fastest way to ask a model alone. But where many ask one that answers within microseconds,
handing the interpreter from thread to thread costs several times what the engine does. So once a worker has a crowd,
its connections come here: whoever has sent something is read, all that was read goes through the engine in one run
(up to the batcher's cap), and all are answered. Nobody is waited for, and nothing waits but for the turn under way.

Here is only what does not block. A connection leaves, for a thread of its own, when the crowd is gone or asks nothing any
more, and when its client stops inside a frame, takes no answer, breaks the protocol, asks with high priority, or ends.
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
from edgert.worker.batcher import late
from edgert.worker.connection import Connection, Crowd, pong
from edgert.worker.pipeline import Asked, Pipeline, Served
from edgert.worker.reply import Reply

ALONE_MAX = 256  # turns of one connection alone, after which it has a thread again

_NO_FRAME = wire.Frame(0, 0, 0, 0, 0, 0, b"", (), b"")
_NOTHING_ASKED = Asked([], 0, False, b"")


class Leave(NamedTuple):
    """How a connection leaves: with what of an answer its client has not taken, with the error that ends it."""

    unsent: bytes = b""
    error: Exception | None = None


class _Guest:
    """A connection, and the request that it was last heard to make.

    When it came and when it was read are in ns; `deadline_s`, on time.monotonic, is None where it has no time-out.
    """

    __slots__ = (
        "asked",
        "came_ns",
        "connection",
        "deadline_s",
        "frames",
        "number",
        "read_ns",
        "reply",
        "request",
        "sock",
        "tensors",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection, self.sock, self.frames = connection, connection.sock, connection.frames
        self.number = self.sock.fileno()
        self.reply = Reply()
        self.came_ns = self.read_ns = 0
        self.deadline_s: float | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of the last request, whose views keep the memory of its frame."""
        self.request, self.asked = _NO_FRAME, _NOTHING_ASKED
        self.tensors: tuple[wire.WireTensor, ...] | None = None  # those that `asked` was made of

    def hear(self) -> wire.Frame | Leave | None:
        """The next frame; None where nothing has come. An end and half a frame are for a thread to look at again."""
        frames = self.frames
        try:
            if frames.more and (frame := frames.feed(0)) is not None:
                self.came_ns = time.perf_counter_ns()
                return frame
            count = self.sock.recv_into(frames.room, 0, socket.MSG_DONTWAIT)
            self.came_ns = time.perf_counter_ns()
            return Leave() if not count else frames.feed(count) or Leave()
        except BlockingIOError:
            return Leave() if frames.missing() else None
        except (EdgeRTError, OSError) as error:
            return Leave(error=error)

    def read(self, request: wire.Frame, pipeline: Pipeline) -> None:
        """Raises RequestError where it is not what the model takes."""
        self.request = request
        self.deadline_s = time.monotonic() + request.arg * 1e-6 if request.arg else None
        if request.tensors is not self.tensors:
            self.tensors = None
            self.asked = pipeline.read(request.tensors)
            self.tensors = request.tensors
        self.read_ns = time.perf_counter_ns()

    def send(self, parts: Sequence[wire.Buffer]) -> Leave | None:
        """None where the client's side has taken all of `parts`."""
        try:
            sent = self.sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return Leave(error=error)
        return None if sent == sum(map(len, parts)) else Leave(unsent=b"".join(parts)[sent:])


class Reactor:
    """Serves the connections given to `add` with `pipeline`, at most `cap` in a turn.

    `leaves` is called with each that leaves, in the reactor's thread: it must not block.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        cap: int,
        crowd: Crowd,
        leaves: Callable[[Connection, Leave], None],
        log: Callable[[str], None],
    ) -> None:
        self._pipeline, self._cap, self._crowd, self._leaves, self._log = pipeline, cap, crowd, leaves, log
        self._guests: dict[int, _Guest] = {}
        self._epoll = select.epoll()

    def start(self) -> None:
        """Begin; it lasts as long as the process."""
        threading.Thread(target=self._serve, name="reactor", daemon=True).start()

    def __len__(self) -> int:
        """How many are served here."""
        return len(self._guests)

    def add(self, connection: Connection) -> None:
        """Serve `connection`, of which no whole frame is left to be answered. From any thread. Raises OSError."""
        guest = _Guest(connection)
        self._guests[guest.number] = guest
        try:
            self._epoll.register(guest.number, select.EPOLLIN)
        except OSError:  # the kernel watches no more
            del self._guests[guest.number]
            raise

    def _serve(self) -> None:
        poll, guests = self._epoll.poll, self._guests
        more: list[_Guest] = []  # those that sent their next frame together with the last one
        alone, turns = -1, 0  # whose number, and how many turns it had alone
        while True:
            ready = [guests[number] for number, _ in poll(0 if more else None)]
            if more:
                ready = list(dict.fromkeys([*more, *ready]))
            for at in range(0, len(ready), self._cap):
                turn = ready[at : at + self._cap]
                try:
                    self._turn(turn)
                except Exception as error:  # noqa: BLE001  # a fault of ours must not silence everybody
                    self._log(f"{type(error).__name__} between requests: {error}")
                    for guest in turn:
                        self._leave(guest, Leave(error=error))
            more = [guest for guest in ready if guest.frames.more and guests.get(guest.number) is guest]
            if len(ready) > 1 or ready[0].number != alone:
                alone, turns = ready[0].number if len(ready) == 1 else -1, 0
            elif (turns := turns + 1) >= ALONE_MAX and not more:
                self._leave(ready[0], Leave())
                alone = -1
            ready, turn = [], []  # who has left is not kept while nobody asks

    def _turn(self, guests: Sequence[_Guest]) -> None:
        """Hear each, and answer all that have asked."""
        together: list[_Guest] = []
        rows = 0  # that they ask for
        for guest in guests:
            heard = guest.hear()
            if heard is None:
                continue
            if isinstance(heard, Leave):
                self._leave(guest, heard)
            elif heard.kind != wire.INFER:
                self._other(guest, heard)
            elif self._read(guest, heard):
                high = heard.flags & wire.FLAG_HIGH_PRIORITY
                if len(guests) > 1 and not high and self._pipeline.is_bare(guest.asked, heard.flags):
                    if together and rows + guest.asked.rows > self._cap:
                        self._answer_all(together)
                        together, rows = [], 0
                    together.append(guest)
                    rows += guest.asked.rows
                else:
                    self._answer(guest)
                    if high:  # only what waits at the batcher can overtake
                        self._leave(guest, Leave())
        if together:
            self._answer_all(together)

    def _read(self, guest: _Guest, request: wire.Frame) -> bool:
        try:
            guest.read(request, self._pipeline)
        except Exception as error:  # noqa: BLE001  # one request must not take the others along
            self._failed(guest, error)
            return False
        return True

    def _other(self, guest: _Guest, request: wire.Frame) -> None:
        try:
            self._send(guest, [pong(request)])
        except ProtocolError as error:
            self._leave(guest, Leave(error=error))

    def _answer(self, guest: _Guest) -> None:
        if self._is_late(guest):
            return
        try:
            served = self._pipeline.infer(guest.asked, guest.request.flags, guest.came_ns, guest.deadline_s)
        except Exception as error:  # noqa: BLE001  # as above
            self._failed(guest, error)
        else:
            self._deliver(guest, served)

    def _answer_all(self, guests: Sequence[_Guest]) -> None:
        """In one run of the engine."""
        guests = [guest for guest in guests if not self._is_late(guest)]
        if not guests:
            return
        times_ns = [(guest.came_ns, guest.read_ns) for guest in guests]
        deadlines_s = [guest.deadline_s for guest in guests if guest.deadline_s is not None]
        until_s = max(deadlines_s) if len(deadlines_s) == len(guests) else None
        try:
            served = self._pipeline.infer_together([guest.asked for guest in guests], times_ns, until_s)
        except Exception as error:  # noqa: BLE001  # as above
            for guest in guests:
                self._failed(guest, error)
        else:
            for guest, one in zip(guests, served, strict=True):
                self._deliver(guest, one)

    def _is_late(self, guest: _Guest) -> bool:
        """Whether its time-out passed while others had their turn; it is told so."""
        if guest.deadline_s is None or time.monotonic() < guest.deadline_s:
            return False
        self._refuse(guest, late())
        return True

    def _deliver(self, guest: _Guest, served: Served) -> None:
        connection, frames, began_ns = guest.connection, guest.frames, time.perf_counter_ns()
        try:
            parts = connection.encoded(guest.reply, served, guest.request)
        except Exception as error:  # noqa: BLE001  # as above
            self._failed(guest, error)
            return
        leave = guest.send(parts)
        if leave is None or leave.unsent:  # the rest of it is sure to follow, or the client to go
            connection.answered(served, guest.came_ns, began_ns)
        if leave is not None:
            self._leave(guest, leave)
            return
        self._crowd.last = connection
        if len(frames.room) > wire.KEEP_BYTES_MAX:
            guest.forget()
            frames.shrink()
        if not self._crowd.many:
            self._leave(guest, Leave())

    def _failed(self, guest: _Guest, error: Exception) -> None:
        if isinstance(error, Moved):  # whoever holds the connection tells the client where to go
            self._leave(guest, Leave(error=error))
        else:
            self._refuse(guest, error)

    def _refuse(self, guest: _Guest, error: Exception) -> None:
        self._send(guest, [guest.connection.refusal(guest.request, error, guest.came_ns)])

    def _send(self, guest: _Guest, parts: Sequence[wire.Buffer]) -> None:
        if (leave := guest.send(parts)) is not None:
            self._leave(guest, leave)

    def _leave(self, guest: _Guest, leave: Leave) -> None:
        if self._guests.get(guest.number) is not guest:
            return
        self._epoll.unregister(guest.number)
        del self._guests[guest.number]
        guest.forget()
        self._leaves(guest.connection, leave)
