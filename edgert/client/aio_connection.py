"""The asyncio client's connections, each with one request at a time, and their pool.

Theory of operation: each open connection has one reader callback on the loop. The callback receives into the frame
buffer, and copies the tensors of an answer at once, because the next bytes may arrive before the waiting task runs.
There is no transport or stream in between, so a request costs the loop one wake-up. If the model of an idle connection
moves, the connection closes when the daemon sends MOVED, not at the next request.

For tensors of 4 KB to 1.2 MB on a socket, bare loops without checks and time-outs were not clearly faster (over
`BufferedProtocol`, `loop.sock_recv_into` and streams). The blocking client takes 0.6 to 0.8 times as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from edgert.client.base import IDLE_CONNECTIONS_MAX
from edgert.client.conversation import (
    OVERLOADED,
    RETRY_PAUSE_S,
    SESSION_UNANSWERED,
    Conversation,
    Event,
    Outputs,
    Retry,
    session_ended,
    timeout_us,
)
from edgert.client.model_interface import Inputs
from edgert.errors import DaemonUnreachable, DeadlineExceeded, EdgeRTError
from edgert.protocol import wire
from edgert.protocol.local_socket import SEND_BUFFER_BYTES, dial
from edgert.protocol.sharing import receive_with_descriptor
from edgert.tensors import InferResponse

DIAL_PAUSE_S = 0.005  # the pause between attempts while the daemon's queue of new connections is full


class Pool:
    """The connections of one model: the limit of parallel requests, and the idle connections."""

    def __init__(self, requests_max: int) -> None:
        self._free = requests_max
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle: list[Connection] = []
        self._closed = False

    async def acquire(self, deadline: float) -> None:
        """Wait until one more request may run. Call `release` when the request ends. Raises DeadlineExceeded."""
        if self._free:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiters.append(turn)
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), _time_out, turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release()  # the turn and the cancellation arrived together
            raise
        finally:
            timer.cancel()

    def release(self) -> None:
        while self._waiters:
            turn = self._waiters.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def pop_idle(self) -> Connection | None:
        return self._idle.pop() if self._idle else None

    def give_back(self, connection: Connection) -> None:
        if self._closed or connection.closed or len(self._idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
        else:
            self._idle.append(connection)

    def discard(self, connection: Connection) -> None:
        """Remove a connection that ended, if it was idle."""
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        self._closed = True
        for connection in list(self._idle):
            connection.close()


def _time_out(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(
            DeadlineExceeded(
                "the time-out passed while other requests of this client were in progress; raise connections_max or timeout_s"
            )
        )


class Connection:
    """One connection to one model, or to the daemon (model None), with one request at a time."""

    @classmethod
    async def open(
        cls, path: Path, model: str | None, pool: Pool | None, deadline: float, *, share: bool, session: bool = False
    ) -> Connection:
        """Connect, send the hello, receive the WELCOME. Raises the daemon's error, Retry, DeadlineExceeded."""
        connection = cls(await _dial(path, deadline), Conversation(model, path, share=share, session=session), pool)
        try:
            await connection._exchange([connection.conversation.hello()], deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def __init__(self, sock: socket.socket, conversation: Conversation, pool: Pool | None) -> None:
        self.closed = False
        # The error that ended the connection, unless a request already received the error.
        self.end_error: Exception = session_ended(SESSION_UNANSWERED)
        self._sock = sock
        self.conversation = conversation
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._receive: Callable[[memoryview], int] = self._receive_first
        self._sending = False  # True while the daemon cannot have all bytes of the request
        self._unsent_resume = b""
        # The result of the request in progress: an event, or an error of the connection.
        self._outcome: asyncio.Future[Event | Exception] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def continue_session(self, resume: bytes) -> None:
        """Let a session that moved here continue: the frame `resume` precedes the next request that is sent."""
        self.conversation.resume = resume  # until the worker sends a newer RESUME
        self._unsent_resume = resume

    async def request(self, inputs: Inputs, deadline: float, flags: int, trace: bool) -> Outputs | InferResponse:
        """Send one request and return its answer; give the connection back to the pool.

        Raises the daemon's error, WorkerLost, Retry.
        """
        try:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the time-out passed before the request was sent; give a longer timeout_s")
            parts = self.conversation.request(inputs, flags, timeout_us(left_s), trace)
            if self._unsent_resume:
                parts, self._unsent_resume = [self._unsent_resume, *parts], b""
            answer = await self._exchange(parts, deadline)
        except EdgeRTError:
            self._give_back()
            raise
        except BaseException:
            # The call was cancelled or raised Retry: close, so that the next request does not receive a late answer.
            self.close()
            raise
        self._give_back()
        return answer

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pool is not None:
            self._pool.discard(self)

    def _give_back(self) -> None:
        if self._sending or (self._pool is None and not self.conversation.is_session):
            self.close()
        elif self._pool is None:
            return
        else:
            self._pool.give_back(self)

    async def _exchange(self, parts: Sequence[wire.Buffer], deadline: float) -> Outputs | InferResponse:
        """Send one frame and return the daemon's answer."""
        if self.closed:  # the connection ended after it left the pool
            raise Retry
        outcome: asyncio.Future[Event | Exception] = self._loop.create_future()
        self._outcome, self._sending, self._deadline = outcome, True, deadline
        if not self._send(parts) and not self.conversation.is_session:  # a session waits for its memory in MOVED
            # The daemon closed before it had the whole request. It may have sent an error: wait for this error.
            self._loop.call_later(RETRY_PAUSE_S, self._fail_if_unanswered, outcome)
        elif self._timer is None or deadline < self._timer_at:
            self._set_timer()
        try:
            event = await outcome
        finally:
            self._outcome = None
        if isinstance(event, Exception):
            raise event
        return event

    def _fail_if_unanswered(self, outcome: asyncio.Future[Event | Exception]) -> None:
        if not outcome.done():
            outcome.set_result(self.conversation.ended(sent=False))

    def _set_timer(self) -> None:
        """Set one timer for many requests. Deadlines usually grow, so a timer that fires early is set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        self._timer = self._loop.call_later(max(0.0, self._deadline - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._outcome is None or self._outcome.done():
            return
        if time.monotonic() < self._deadline:
            self._set_timer()
        else:
            self.fail(self.conversation.timed_out(sent=not self._sending))

    def _send(self, parts: Sequence[wire.Buffer]) -> bool:
        """Send what the kernel accepts now, and the rest by a callback. Return False if the socket is closed."""
        try:
            sent = self._sock.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        if sent == sum(map(len, parts)):
            self._sending = False
        else:
            self._send_rest(parts, sent)
        return True

    def _send_rest(self, parts: Sequence[wire.Buffer], sent: int) -> None:
        """Send the remaining bytes whenever the kernel has room."""
        rest = _unsent(parts, sent)

        def writable() -> None:
            nonlocal rest
            try:
                rest = _unsent(rest, self._sock.sendmsg(rest))
            except BlockingIOError:
                return
            except OSError:
                # The reader will receive the daemon's error, if there is one, and then the end of the connection.
                self._loop.remove_writer(self._sock.fileno())
                return
            if not rest:
                self._sending = False
                self._loop.remove_writer(self._sock.fileno())

        self._loop.add_writer(self._sock.fileno(), writable)

    def _on_readable(self) -> None:
        """Receive bytes from the daemon. The event loop calls this method, even if no request is in progress."""
        conversation, frames = self.conversation, self.conversation.frames
        try:
            count = self._receive(frames.room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.fail(conversation.ended(not self._sending, error))
            return
        if not count:
            self.fail(conversation.ended(not self._sending))
            return
        try:
            frame = frames.feed(count)
            while frame is not None:
                self._received(frame)
                frame = frames.feed(0) if frames.more and not self.closed else None
        except EdgeRTError as error:
            self.fail(error)

    def _receive_first(self, room: memoryview) -> int:
        """Receive the start of the WELCOME, and the shared memory that may arrive with the WELCOME."""
        count, descriptor = receive_with_descriptor(self._sock, room)
        self._receive = self._sock.recv_into
        self.conversation.map_memory(descriptor)
        return count

    def _received(self, frame: wire.Frame) -> None:
        outcome = self._outcome
        if outcome is None or outcome.done():
            event = self.conversation.received(frame)
            self.fail(event if isinstance(event, Exception) else Retry())  # no request waits for this answer
            return
        outcome.set_result(self.conversation.received(frame))
        if self.conversation.over:
            self.close()

    def fail(self, error: Exception) -> None:
        """Close the connection and end the request in progress with `error`."""
        self.close()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(error)
        else:
            self.end_error = error


def _unsent(parts: Sequence[wire.Buffer], sent: int) -> list[wire.Buffer]:
    """Return `parts` without their first `sent` bytes, and without a copy."""
    rest: list[wire.Buffer] = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            rest.append(memoryview(part)[sent:])
            sent = 0
    return rest


async def _dial(path: Path, deadline: float) -> socket.socket:
    """Return a connected socket. A connect to a Unix socket waits only while the daemon's queue is full."""
    while True:
        try:
            sock = dial(path, deadline, wait=False)
        except DaemonUnreachable as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            if time.monotonic() + DIAL_PAUSE_S >= deadline:
                raise DeadlineExceeded(f"the daemon did not accept the connection in time; {OVERLOADED}") from error
            await asyncio.sleep(DIAL_PAUSE_S)
            continue
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return sock
