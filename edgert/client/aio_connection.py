"""The asyncio client's connections: one request at a time each, and the pool that they come from.

Theory of operation: each connection keeps one reader callback on the loop for as long as it lives. It receives
straight into the frame buffer and copies an answer's tensors out at once, as the next bytes may come before
the task that waits has run. A request is sent from where its arrays lie, or through memory shared with the daemon,
as the blocking client does it. So a request costs the loop one wake-up, with no transport or stream in between, and
an idle connection whose model moved away is dropped when the daemon says so, not when the next request finds out.

Measured on one core with the daemon, medians in us of interleaved runs at 4 KB / 150 KB / 1.2 MB: this client
71 / 138 / 637; bare loops without its checks and time-outs over BufferedProtocol 70 / 144 / 1,125, over
`loop.sock_recv_into` 104 / 172 / 714, over streams 104 (55 in another run) / 143 / 1,220;
the blocking client on a socket 44 / 94 / 496. Through shared memory it takes 0.45 of that at 1.2 MB (`bench.transport`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from edgert.client.calls import IDLE_CONNECTIONS_MAX, Again, hello
from edgert.client.conversation import RETRY_PAUSE_S, Conversation, Inputs, ModelInterface, arg_of, welcome_of
from edgert.errors import DaemonUnreachable, DeadlineExceeded, EdgeRTError, Unavailable, WorkerLost
from edgert.protocol import wire
from edgert.protocol.local_socket import SEND_BUFFER_BYTES, dial
from edgert.protocol.sharing import SharedArea, receive_with_descriptor
from edgert.tensors import InferResponse

DIAL_PAUSE_S = 0.005  # between attempts while the daemon's queue of new connections is full


class Pool:
    """The connections of one model: a bound on requests at once, and the connections that wait for the next."""

    def __init__(self, requests_max: int) -> None:
        self._free = requests_max
        self._turns: deque[asyncio.Future[None]] = deque()
        self._idle: list[Connection] = []
        self._closed = False

    async def enter(self, deadline: float) -> None:
        """Wait for a turn; every turn taken is given on by `leave`. Raises DeadlineExceeded."""
        if self._free:
            self._free -= 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._turns.append(turn)
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), _give_up, turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()  # the turn came together with the cancellation
            raise
        finally:
            timer.cancel()

    def leave(self) -> None:
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def idle_one(self) -> Connection | None:
        return self._idle.pop() if self._idle else None

    def give_back(self, connection: Connection) -> None:
        if self._closed or connection.broken or len(self._idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
        else:
            self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """A connection ended; if it was idle, nobody is to find it any more."""
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        self._closed = True
        for connection in list(self._idle):
            connection.close()


def _give_up(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(DeadlineExceeded("the time-out passed while other requests of this client were under way"))


class _Answered(NamedTuple):
    """A frame that came, and copies of its tensors: its own lie in the buffer of what comes next."""

    frame: wire.Frame
    outputs: dict[str, NDArray[Any]]


class Connection:
    """One connection, bound by its hello to one model (None: to the daemon itself). One request at a time."""

    welcome: dict[str, Any]

    @classmethod
    async def opened(
        cls, path: Path, model: str | None, pool: Pool | None, deadline: float, transport: str
    ) -> Connection:
        """Connect and exchange hello and WELCOME. Raises the daemon's error, DaemonUnreachable, DeadlineExceeded."""
        connection = cls(await _dial(path, deadline), pool)
        try:
            await connection._greet(path, model, deadline, transport)
        except BaseException:
            connection.close()
            raise
        return connection

    def __init__(self, sock: socket.socket, pool: Pool | None) -> None:
        self.broken = False
        self._sock, self._pool = sock, pool
        self._loop = asyncio.get_running_loop()
        self._frames = wire.FrameBuffer()
        self._receive: Callable[[memoryview], int] = self._receive_first
        self._area: SharedArea | None = None
        self._talk: Conversation | None = None  # once the daemon has greeted, for a model
        self._sending = False  # whether the daemon certainly lacks bytes of the request
        # What is under way ends in an answer or in the error to raise.
        self._outcome: asyncio.Future[_Answered | Exception] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._loop.add_reader(sock.fileno(), self._readable)

    async def ask(
        self, inputs: Inputs, deadline: float, flags: int, trace: bool
    ) -> dict[str, NDArray[Any]] | InferResponse:
        """Send one request and receive its answer, then return to the pool. Raises Again where no engine saw it."""
        assert self._talk is not None  # only models' connections are asked
        try:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the time-out had passed before the request was sent; give a longer timeout_s")
            answered = await self._exchange(self._talk.ask(inputs, flags, arg_of(left_s)), deadline)
        except EdgeRTError:
            self._give_back()
            raise
        except BaseException:  # cancelled, or the model moved: nothing may meet what is under way here
            self.close()
            raise
        self._give_back()
        return self._talk.response(answered.frame, answered.outputs) if trace else answered.outputs

    def close(self) -> None:
        if self.broken:
            return
        self.broken = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pool is not None:
            self._pool.forget(self)

    def _give_back(self) -> None:
        if self._pool is None or self._sending:
            self.close()
        else:
            self._pool.give_back(self)

    async def _greet(self, path: Path, model: str | None, deadline: float, transport: str) -> None:
        try:
            frame = (await self._exchange([hello(model, transport)], deadline)).frame
        except (WorkerLost, Again) as error:
            if error.__cause__ is None:
                raise Unavailable("the daemon is restarting this model", retry_after_s=RETRY_PAUSE_S) from error
            raise DaemonUnreachable(f"the daemon at {path} closed the connection: {error.__cause__}") from error
        self.welcome = welcome_of(frame)
        if model is not None:
            interface = ModelInterface(model, self.welcome)
            self._frames.limit(interface.frame_bytes_max)
            if self._area is not None:
                self._frames.shared = self._area.response
            self._talk = Conversation(interface, frame.model_id, self._area)

    async def _exchange(self, parts: Sequence[wire.Buffer], deadline: float) -> _Answered:
        """Send one frame and wait for what comes back. Raises the daemon's error, WorkerLost, Again where it moved."""
        if self.broken:  # it ended since it was taken from the pool
            raise Again
        outcome: asyncio.Future[_Answered | Exception] = self._loop.create_future()
        self._outcome, self._sending, self._deadline = outcome, True, deadline
        if not self._send(parts):
            # It closed before it had the whole request: its own words, if there are any, are still to be read.
            self._loop.call_later(RETRY_PAUSE_S, _settle, outcome, Again())
        elif self._timer is None or deadline < self._timer_at:
            self._set_timer()
        try:
            result = await outcome
        finally:
            self._outcome = None
        if isinstance(result, Exception):
            raise result
        return result

    def _set_timer(self) -> None:
        """One timer serves many requests: their deadlines only ever move on, so it is set again when it rings."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._deadline
        self._timer = self._loop.call_later(max(0.0, self._deadline - time.monotonic()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._outcome is None or self._outcome.done():
            return
        if time.monotonic() < self._deadline:
            self._set_timer()
            return
        self.close()
        if self._sending:
            error = DeadlineExceeded("the daemon did not take the request in time; it may be overloaded")
        else:
            error = DeadlineExceeded("no answer came in time; give a longer timeout_s or look at edgertd status")
        self._outcome.set_result(error)

    def _send(self, parts: Sequence[wire.Buffer]) -> bool:
        """Send what the kernel takes now and see to the rest. False where the daemon has closed the connection."""
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
        """Send what the kernel did not take at once, as it makes room; the answer is waited for meanwhile."""
        rest = _after(parts, sent)

        def writable() -> None:
            nonlocal rest
            try:
                rest = _after(rest, self._sock.sendmsg(rest))
            except BlockingIOError:
                return
            except OSError:
                # The reader will find the end of the connection, and before it what the daemon has to say.
                self._loop.remove_writer(self._sock.fileno())
                return
            if not rest:
                self._sending = False
                self._loop.remove_writer(self._sock.fileno())

        self._loop.add_writer(self._sock.fileno(), writable)

    def _readable(self) -> None:
        """Take what the daemon sent. Runs in the event loop, whether a request is under way or not."""
        frames = self._frames
        try:
            count = self._receive(frames.room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._ended(self._lost(error))
            return
        if not count:
            self._ended(self._lost(None))
            return
        try:
            frame = frames.feed(count)
            while frame is not None:
                self._received(frame)
                frame = frames.feed(0) if frames.more and not self.broken else None
        except EdgeRTError as error:
            self._ended(error)

    def _receive_first(self, room: memoryview) -> int:
        """Receive the beginning of the WELCOME, with the shared memory that may come along."""
        count, descriptor = receive_with_descriptor(self._sock, room)
        self._receive = self._sock.recv_into
        if descriptor is not None:
            self._area = SharedArea.opened(descriptor)
        return count

    def _received(self, frame: wire.Frame) -> None:
        outcome, talk = self._outcome, self._talk
        if outcome is None or outcome.done():
            self.close()  # moved, or an answer that nobody waits for
        elif frame.kind == wire.MOVED:
            self._ended(Again())
        elif frame.kind == wire.ERROR and frame.request_id in (0, 0 if talk is None else talk.request_id):
            if frame.request_id == 0:  # it concerns the connection, which ends now
                self.close()
            outcome.set_result(wire.error_of(frame))
        elif talk is None:  # the answer to a hello
            outcome.set_result(_Answered(frame, {}))
        elif frame.kind == wire.RESULT and frame.request_id == talk.request_id:
            outcome.set_result(_Answered(frame, talk.outputs(frame)))
        else:
            raise EdgeRTError(f"the daemon answered with frame {frame.kind} for request {frame.request_id}")

    def _ended(self, error: Exception) -> None:
        """The connection is over. Tell whoever waits."""
        self.close()
        if self._outcome is not None:
            _settle(self._outcome, error)

    def _lost(self, error: OSError | None) -> Exception:
        """What the end of the connection means for the request: a request that was not sent whole met no engine."""
        if self._sending:
            again = Again()
            again.__cause__ = error
            return again
        if error is None:
            return WorkerLost("the model's worker ended during the request; send it again")
        lost = WorkerLost(f"the daemon dropped the connection during the request: {error}; send it again")
        lost.__cause__ = error
        return lost


def _settle(outcome: asyncio.Future[_Answered | Exception], result: _Answered | Exception) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _after(parts: Sequence[wire.Buffer], sent: int) -> list[wire.Buffer]:
    """What is left of `parts` after their first `sent` bytes. Nothing is copied."""
    rest: list[wire.Buffer] = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
        else:
            rest.append(memoryview(part)[sent:])
            sent = 0
    return rest


async def _dial(path: Path, deadline: float) -> socket.socket:
    """A connected socket. Connecting to a Unix socket never waits, but where the daemon's queue is full."""
    while True:
        try:
            sock = dial(path, deadline, wait=False)
        except DaemonUnreachable as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            if time.monotonic() + DIAL_PAUSE_S >= deadline:
                raise DeadlineExceeded("the daemon did not accept the connection in time") from error
            await asyncio.sleep(DIAL_PAUSE_S)
            continue
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        return sock
