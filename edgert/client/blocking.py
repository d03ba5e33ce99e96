"""The blocking client of the daemon's local socket.

A `Client` may be used by many threads: each request takes a connection of its own from a small pool and
gives it back, so threads never wait for each other here. Connections are made when needed, and made again
after the daemon restarted or moved a model to a new version.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from numpy.typing import NDArray

from edgert.client.calls import (
    IDLE_CONNECTIONS_MAX,
    Again,
    Priority,
    again_wait_s,
    check_transport,
    hello,
    priority_flag,
)
from edgert.client.conversation import RETRY_PAUSE_S, Conversation, Inputs, ModelInterface, arg_of, welcome_of
from edgert.config import default_socket
from edgert.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    EdgeRTError,
    RequestError,
    Unavailable,
    WorkerLost,
)
from edgert.protocol import wire
from edgert.protocol.local_socket import SEND_BUFFER_BYTES, dial, timeval
from edgert.protocol.sharing import SharedArea, receive_with_descriptor
from edgert.tensors import InferResponse


class Client:
    """Asks the daemon at `path` (default: $EDGERT_SOCKET, else where this machine's daemon listens).

    `timeout_s` bounds every call, connecting and waiting for a restarting worker included. `transport`
    "auto" puts large tensors into memory shared with the daemon where both sides can; "socket" never does.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, timeout_s: float = 30.0, transport: str = "auto"
    ) -> None:
        self.path = Path(path) if path is not None else default_socket()
        self.timeout_s = timeout_s
        self.transport = check_transport(transport)
        # Lists are used as stacks: pop and append are atomic, so no lock is taken for a request.
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)
        self._closed = False

    @overload
    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: Literal[False] = False,
    ) -> dict[str, NDArray[Any]]: ...

    @overload
    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: Literal[True],
    ) -> InferResponse: ...

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: bool = False,
    ) -> dict[str, NDArray[Any]] | InferResponse:
        """Answer one batch: arrays by output name, each with the batch on axis 0.

        `inputs` is one array, for a model with one input, or arrays by input name. Give the batch axis, or
        leave it out of every input to ask for one item. Where the model has preprocessing, UINT8 arrays
        are taken as well, and where it decodes images, the bytes of a JPEG or PNG file, or a list of such
        (docs/processing.md). `priority` "high" goes before others that wait for the engine; `trace` gives what
        `request` gives. Raises RequestError (the inputs do not fit), Unavailable (try again), DeadlineExceeded.
        """
        flags = 0 if cache else wire.FLAG_NO_CACHE
        if priority != "normal":
            flags |= priority_flag(priority)
        how = _Connection.request if trace else _Connection.infer
        outputs: dict[str, NDArray[Any]] | InferResponse = self._call(model, inputs, timeout_s, flags, how)
        return outputs

    def request(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
    ) -> InferResponse:
        """As `infer`, with the release that answered, the stage times, the batch and whether the cache did."""
        return self.infer(model, inputs, timeout_s=timeout_s, cache=cache, priority=priority, trace=True)

    def models(self) -> list[dict[str, Any]]:
        """What the daemon serves: name, release and state of each model."""
        connection = _Connection(self.path, None, time.monotonic() + self.timeout_s, self.transport)
        connection.close()
        return list(connection.welcome["models"])

    def metadata(self, model: str) -> dict[str, Any]:
        """What the daemon says about `model`: release, inputs, outputs, labels."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                connection = self._connect(model, deadline)
            except Again as again:
                pause(again, deadline)
                continue
            self._give_back(connection)
            return dict(connection.welcome)

    def labels(self, model: str) -> list[str]:
        """The names of the model's classes by index, empty where its bundle has none. Ask once and keep them."""
        return [str(label) for label in self.metadata(model).get("labels", ())]

    def close(self) -> None:
        """Close the idle connections; a request under way in another thread ends first."""
        self._closed = True
        for connections in list(self._idle.values()):
            while connections:
                connections.pop().close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, model: str, inputs: Inputs, timeout_s: float | None, flags: int, how: Any) -> Any:
        """Ask over an idle connection or a new one; again over another where no engine saw the request."""
        if timeout_s is None:
            timeout_s = self.timeout_s
        deadline = time.monotonic() + timeout_s
        idle = self._idle[model]
        while True:
            try:
                if idle:
                    connection = idle.pop()
                else:
                    connection = self._connect(model, deadline)
                    timeout_s = max(0.001, deadline - time.monotonic())
            except IndexError:  # another thread took the last one
                continue
            except Again as again:
                pause(again, deadline)
                continue
            try:
                answer = how(connection, inputs, timeout_s, deadline, flags)
            except Again as again:
                connection.close()
                pause(again, deadline)
                continue
            except EdgeRTError:
                if not connection.broken:
                    self._give_back(connection)
                raise
            except BaseException:  # a half-sent request must not be found by the next one
                connection.close()
                raise
            if self._closed or len(idle) >= IDLE_CONNECTIONS_MAX:
                connection.close()
            else:
                idle.append(connection)
            return answer

    def _connect(self, model: str, deadline: float) -> _Connection:
        if self._closed:
            raise RequestError("this client is closed; make a new one")
        try:
            return _Connection(self.path, model, deadline, self.transport)
        except Unavailable as error:
            if isinstance(error, DaemonUnreachable) or error.retry_after_s is None:
                raise
            raise Again(error) from error

    def _give_back(self, connection: _Connection) -> None:
        idle = self._idle[connection.model or ""]
        if self._closed or len(idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
        else:
            idle.append(connection)


def pause(again: Again, deadline: float) -> None:
    """Wait as long as the daemon asked for, or raise its error when that is past the deadline."""
    wait_s = again_wait_s(again, deadline)
    if wait_s:
        time.sleep(wait_s)


class _Connection:
    """One connection, bound by its hello to one model (None: to the daemon itself)."""

    def __init__(self, path: Path, model: str | None, deadline: float, transport: str) -> None:
        self.model = model
        self.broken = False
        self._frames = wire.FrameBuffer()
        self._timeout_s, self._timeout_us = 0.0, 0
        self._area: SharedArea | None = None
        self._sock = dial(path, deadline)
        try:
            received = self._greet(model, transport, deadline)
            self.welcome = welcome_of(received)
        except OSError as error:
            self.close()
            raise DaemonUnreachable(f"the daemon at {path} closed the connection: {error}") from error
        except BaseException:
            self.close()
            raise
        assert received is not None  # welcome_of has said otherwise
        interface = ModelInterface(model or "", self.welcome)
        self._frames.limit(interface.frame_bytes_max)
        self._talk = Conversation(interface, received.model_id, self._area)

    def infer(self, inputs: Inputs, timeout_s: float, deadline: float, flags: int) -> dict[str, NDArray[Any]]:
        _, outputs = self._exchange(inputs, timeout_s, deadline, flags)
        return outputs

    def request(self, inputs: Inputs, timeout_s: float, deadline: float, flags: int) -> InferResponse:
        received, outputs = self._exchange(inputs, timeout_s, deadline, flags)
        return self._talk.response(received, outputs)

    def close(self) -> None:
        self.broken = True
        with contextlib.suppress(OSError):
            self._sock.close()

    def _exchange(
        self, inputs: Inputs, timeout_s: float, deadline: float, flags: int
    ) -> tuple[wire.Frame, dict[str, NDArray[Any]]]:
        """Send one request and receive its answer: the frame, and copies of its tensors by name."""
        if timeout_s != self._timeout_s:
            self._set_timeout(timeout_s)
        talk, sock, frames = self._talk, self._sock, self._frames
        parts = talk.ask(inputs, flags, self._timeout_us)
        try:
            sent = sock.send(parts[0]) if len(parts) == 1 else sock.sendmsg(parts)
            if sent != talk.size_bytes:  # a signal came in between, or the daemon takes nothing
                sock.sendall(b"".join(parts)[sent:])
        except BlockingIOError as error:
            self.close()
            raise DeadlineExceeded("the daemon did not take the request in time; it may be overloaded") from error
        except OSError as error:
            raise self._refused() from error
        try:
            count = sock.recv_into(frames.room)
        except OSError:  # said again, and translated, below
            count = 0
        received = frames.feed(count) if count else None
        if received is None or received.kind != wire.RESULT or received.request_id != talk.request_id:
            received = self._answer(received, deadline)
        return received, talk.outputs(received)

    def _answer(self, received: wire.Frame | None, deadline: float) -> wire.Frame:
        """The RESULT of the request just sent. Raises the daemon's error, WorkerLost, or Again where it moved."""
        try:
            received = received or self._receive(deadline)
        except OSError as error:
            self.close()
            raise WorkerLost(f"the daemon dropped the connection during the request: {error}; send it again") from error
        if received is None:
            self.close()
            raise WorkerLost("the model's worker ended during the request; send it again")
        if received.kind == wire.RESULT and received.request_id == self._talk.request_id:
            return received
        if received.kind == wire.ERROR and received.request_id in (0, self._talk.request_id):
            said = wire.error_of(received)
            if received.request_id == 0:  # it concerns the connection, which ends now
                self.close()
                if said.retryable:  # no engine saw the request: a new connection may find a daemon that serves
                    raise Again from said
            raise said
        self.close()
        if received.kind == wire.MOVED:
            raise Again
        raise EdgeRTError(f"the daemon answered with frame {received.kind} for request {received.request_id}")

    def _receive(self, deadline: float) -> wire.Frame | None:
        """The next frame, or None at the end of the connection."""
        frames = self._frames
        while True:
            self._set_timeout(max(0.001, deadline - time.monotonic()))
            try:
                count = self._sock.recv_into(frames.room)
            except BlockingIOError as error:
                self.close()
                raise DeadlineExceeded(
                    "no answer came in time; give a longer timeout_s or look at edgertd status"
                ) from error
            if not count:
                return None
            received = frames.feed(count)
            if received is not None:
                return received

    def _refused(self) -> Exception:
        """Why the daemon closed before it had the whole request: its own words, else it had moved or restarted."""
        try:
            received = self._receive(time.monotonic() + RETRY_PAUSE_S)
        except (OSError, EdgeRTError):
            received = None
        self.close()
        if received is not None and received.kind == wire.ERROR:
            error = wire.error_of(received)
            if not error.retryable:
                return error
        return Again()  # no engine saw the request

    def _greet(self, model: str | None, transport: str, deadline: float) -> wire.Frame | None:
        """Say hello and receive the WELCOME, with the shared memory that may come along."""
        self._set_timeout(max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock.sendall(hello(model, transport))
        try:
            count, descriptor = receive_with_descriptor(self._sock, self._frames.room)
        except BlockingIOError as error:
            raise DeadlineExceeded("the daemon did not answer the hello in time") from error
        if descriptor is not None:
            self._area = SharedArea.opened(descriptor)
        received = self._frames.feed(count) if count else None
        if received is None and count:
            received = self._receive(deadline)
        if self._area is not None:
            self._frames.shared = self._area.response
        return received

    def _set_timeout(self, timeout_s: float) -> None:
        """Let the kernel bound each send and receive: cheaper than a poll before every call."""
        self._timeout_s, self._timeout_us = timeout_s, arg_of(timeout_s)
        value = timeval(timeout_s)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
