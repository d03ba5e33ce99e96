"""The blocking client of the daemon's local socket.

Threads may share a `Client`. Each request takes a connection from a small pool and returns it, so threads never wait
for each other in the client. The client opens connections on demand, and again after the daemon restarts or moves a
model to a new version. A forked process opens its own connections. Otherwise each process could receive answers to the
requests of the other process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from edgert.client.base import (
    IDLE_CONNECTIONS_MAX,
    BaseClient,
    CallOptions,
    Priority,
    SessionOptions,
    check_model,
    request_flags,
)
from edgert.client.blocking_connection import Connection
from edgert.client.conversation import (
    SESSION_BUSY,
    SESSION_CLOSED,
    SESSION_INHERITED,
    SESSION_NOT_COPIED,
    SESSION_UNANSWERED,
    Conversation,
    Outputs,
    Retry,
    session_ended,
    session_lost,
)
from edgert.client.model_interface import Inputs
from edgert.errors import DeadlineExceeded, ModelNotFound, RequestError, Unavailable, WorkerLost
from edgert.protocol import wire
from edgert.protocol.sharing import SHARE_BYTES_MIN
from edgert.tensors import InferResponse

if TYPE_CHECKING:
    from typing_extensions import Unpack


_open: weakref.WeakSet[Client | Session] = weakref.WeakSet()  # the open clients and sessions of this process


def _close_inherited_connections() -> None:
    for each in list(_open):
        each._close_inherited()


os.register_at_fork(after_in_child=_close_inherited_connections)


class Client(BaseClient):
    """Sends requests to the daemon at `path`.

    Args:
        path: The daemon's socket. The default is $EDGERT_SOCKET, else the socket of this machine's daemon.
        timeout_s: The time limit of every call, including the time to connect and to wait for a worker that restarts.
        transport: "auto" sends large tensors through memory shared with the daemon, if both sides support this.
            "socket" sends all tensors through the socket.
        probe: Whether this client is a check or a benchmark. Telemetry does not count its requests as requests of apps.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 30.0,
        transport: str = "auto",
        probe: bool = False,
    ) -> None:
        super().__init__(path, timeout_s, transport)
        self._probe = probe
        # The lists are stacks. Their pop and append are atomic, so a request needs no lock.
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._large: set[str] = set()  # models whose connections ask for shared memory
        _open.add(self)

    @overload
    def infer(
        self, model: str, inputs: Inputs, *, trace: Literal[False] = False, **options: Unpack[CallOptions]
    ) -> Outputs: ...

    @overload
    def infer(
        self, model: str, inputs: Inputs, *, trace: Literal[True], **options: Unpack[CallOptions]
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
    ) -> Outputs | InferResponse:
        """Send one batch; return the answer: arrays by output name, each with the batch on axis 0.

        Args:
            model: The name of the model.
            inputs: One array, for a model with one input, or arrays by input name. Give the batch axis in every input;
                for a single item, you may omit the batch axis in every input. A model with preprocessing also accepts
                UINT8 arrays. A model that decodes images also accepts the bytes of a JPEG or PNG file, or a list of
                such files (docs/images.md).
            timeout_s: The time limit of this call; None for the client's `timeout_s`.
            cache: Whether a cache may answer.
            priority: With "high", the request runs before other requests that wait for the engine.
            trace: Whether to return an InferResponse: the outputs, the release that answered, the stage times, the
                batch, and whether a cache answered.

        Raises RequestError (the inputs do not fit), Unavailable (try again), DeadlineExceeded.
        """
        # Every request passes here, and with many clients on one core, each function costs cache misses. So the usual
        # values are recognized without a call (decision 12).
        if type(model) is not str:
            check_model(model)
        flags = (0 if cache else wire.FLAG_NO_CACHE) if priority == "normal" else request_flags(cache, priority)
        timeout_s = self.timeout_s if timeout_s is None else self.timeout_of(timeout_s)
        deadline = time.monotonic() + timeout_s
        idle = self._idle[model]
        while True:
            try:
                connection = idle.pop()
            except IndexError:
                connection = self._connected(model, deadline, share=model in self._large or _may_be_large(inputs))
                timeout_s = max(0.001, deadline - time.monotonic())
            try:
                return connection.request(inputs, timeout_s, deadline, flags, trace)
            except Retry as retry:
                time.sleep(retry.wait_s(deadline - time.monotonic()))
                timeout_s = max(0.001, deadline - time.monotonic())
            finally:
                if connection.closed or connection.conversation.outgrown or len(idle) >= IDLE_CONNECTIONS_MAX:
                    self._discard(connection, model)
                else:
                    idle.append(connection)
                    if self._closed:  # checked last, because another thread may close the client at any time
                        self.close_idle()

    def session(self, model: str) -> Session:
        """Start a session of `model`: each request continues the previous request.

        Close the session, or use the session in a `with` block. Between requests, the daemon keeps the model's state
        and the values that the next window needs. Raises Overloaded (too many sessions), RequestError (the model has no
        memory to keep), Unavailable, DeadlineExceeded.
        """
        check_model(model)
        deadline = time.monotonic() + self.timeout_s
        return Session(self, self._connected(model, deadline, share=True, session=True), model)

    def models(self) -> list[dict[str, Any]]:
        """Return the name, release and state of each model that the daemon serves."""
        connection = self._connected(None, time.monotonic() + self.timeout_s)
        connection.close()
        return list(connection.conversation.welcome["models"])

    def metadata(self, model: str) -> dict[str, Any]:
        """Return the description of `model`: release, inputs, outputs, labels."""
        check_model(model)
        connection = self._connected(model, time.monotonic() + self.timeout_s)
        connection.close()
        return dict(connection.conversation.welcome)

    def labels(self, model: str) -> list[str]:
        """Return the model's class names by index; empty if it has none. Call this once and keep the result."""
        return [str(label) for label in self.metadata(model).get("labels", ())]

    def close(self) -> None:
        """Close the idle connections. The connection of a request in progress closes when the request ends."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections and free the memory of these connections. Later requests connect again."""
        for connections in list(self._idle.values()):
            with contextlib.suppress(IndexError):  # other threads may take connections at the same time
                while True:
                    connections.pop().close()

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "probe": self._probe}

    def _close_inherited(self) -> None:
        self.close_idle()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _connected(
        self, model: str | None, deadline: float, *, share: bool = False, session: bool = False
    ) -> Connection:
        """Return an accepted connection. With `share`, it requests shared memory, if `transport` allows this."""
        may_share = self._share and model is not None
        refusal: Unavailable | None = None
        while True:
            self._check_open()
            conversation = Conversation(
                model, self.path, share=share and may_share, may_share=may_share, probe=self._probe, session=session
            )
            try:
                return Connection(self.path, conversation, deadline)
            except Retry as retry:
                refusal = retry.error
                time.sleep(retry.wait_s(deadline - time.monotonic()))
            except DeadlineExceeded as error:
                raise refusal or error from None  # the last refusal is the reason why the time passed
            except ModelNotFound:  # an app, such as the HTTP server, may pass on any number of its users' names
                self._idle.pop(model or "", None)
                raise

    def _discard(self, connection: Connection, model: str) -> None:
        """Close a connection that no later request can use."""
        connection.close()
        if connection.conversation.outgrown:
            self._large.add(model)


def _may_be_large(inputs: Inputs) -> bool:
    """Return whether `inputs` seem large enough for shared memory. Only the frame shows the exact size."""
    values = inputs.values() if isinstance(inputs, Mapping) else (inputs,)
    sizes = (len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0) for value in values)
    return sum(sizes) >= SHARE_BYTES_MIN


class Session:
    """A session of `model`: requests on one connection, each of which continues the previous request.

    `Client.session` creates a session, and one thread at a time may use the session. A session follows the model to
    another worker, and to a new version that continues the sessions of the old version.
    """

    def __init__(self, client: Client, connection: Connection, model: str) -> None:
        self._client = client
        self._connection = connection
        self._model = model
        self._end_reason = ""  # the reason why this client has ended the session; "" while the session may continue
        self._one_request = threading.Lock()
        _open.add(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(SESSION_NOT_COPIED)

    @overload
    def infer(self, inputs: Inputs, *, trace: Literal[False] = False, **options: Unpack[SessionOptions]) -> Outputs: ...

    @overload
    def infer(self, inputs: Inputs, *, trace: Literal[True], **options: Unpack[SessionOptions]) -> InferResponse: ...

    def infer(
        self, inputs: Inputs, *, timeout_s: float | None = None, priority: Priority = "normal", trace: bool = False
    ) -> Outputs | InferResponse:
        """Send the next chunk; return arrays by output name, one item for each window that is now complete.

        Inputs and options are the same as for `Client.infer`. After an error of the daemon, the session continues
        without this chunk. Raises SessionLost if the session cannot continue: start a new session. Raises RequestError
        while another request of this session is in progress.
        """
        flags = request_flags(True, priority)
        timeout_s = self._client.timeout_of(timeout_s)
        deadline = time.monotonic() + timeout_s
        if not self._one_request.acquire(blocking=False):
            raise RequestError(SESSION_BUSY)
        try:
            while True:
                if self._connection.closed:
                    self._move(deadline)
                    timeout_s = max(0.001, deadline - time.monotonic())
                try:
                    return self._connection.request(inputs, timeout_s, deadline, flags, trace)
                except (Retry, WorkerLost) as error:
                    if not self._connection.conversation.moved:
                        raise session_lost(error) from error
        finally:
            self._one_request.release()

    def close(self) -> None:
        """End the session. The daemon frees the memory of the session."""
        self._end_reason = SESSION_CLOSED
        self._connection.close()

    def _close_inherited(self) -> None:
        self._end_reason = SESSION_INHERITED
        self._one_request = threading.Lock()  # at the time of the fork, another thread may have held the lock
        self._connection.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _move(self, deadline: float) -> None:
        """Connect to the worker that continues the session. Raises SessionLost if no worker does."""
        before = self._connection
        if self._end_reason or not before.conversation.moved:
            raise session_ended(self._end_reason or SESSION_UNANSWERED)
        self._connection = self._client._connected(self._model, deadline, share=True, session=True)
        self._connection.send_resume(before.conversation.resume, deadline)
