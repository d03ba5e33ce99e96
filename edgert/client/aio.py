"""The asyncio client of the daemon's local socket: like `Client`, but it never blocks the event loop.

A cancelled or timed-out call closes the connection, so that no other request can receive the late answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from edgert.client.aio_connection import Connection, Pool
from edgert.client.base import BaseClient, CallOptions, Priority, SessionOptions, check_model, request_flags
from edgert.client.conversation import (
    SESSION_BUSY,
    SESSION_CLOSED,
    SESSION_NOT_COPIED,
    Outputs,
    Retry,
    session_ended,
    session_lost,
)
from edgert.client.model_interface import Inputs
from edgert.errors import DeadlineExceeded, ModelNotFound, RequestError, SessionLost, Unavailable, WorkerLost
from edgert.tensors import InferResponse

if TYPE_CHECKING:
    from typing_extensions import Unpack

CONNECTIONS_MAX = 64


class AsyncClient(BaseClient):
    """Sends requests to the daemon at `path`.

    One client serves any number of tasks of one event loop. Each request in progress has its own connection. A
    cancelled call closes its connection and does not change the client.

    Args:
        path: As for `Client`.
        timeout_s: As for `Client`.
        connections_max: The largest number of requests in progress for one model. Further requests wait; their
            time-out includes this wait.
        transport: As for `Client`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 30.0,
        connections_max: int = CONNECTIONS_MAX,
        transport: str = "auto",
    ) -> None:
        super().__init__(path, timeout_s, transport)
        if connections_max < 1:
            raise RequestError(f"connections_max is {connections_max}; give at least 1")
        self.connections_max = connections_max
        self._pools: dict[str, Pool] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @overload
    async def infer(
        self, model: str, inputs: Inputs, *, trace: Literal[False] = False, **options: Unpack[CallOptions]
    ) -> Outputs: ...

    @overload
    async def infer(
        self, model: str, inputs: Inputs, *, trace: Literal[True], **options: Unpack[CallOptions]
    ) -> InferResponse: ...

    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: bool = False,
    ) -> Outputs | InferResponse:
        """Send one batch and return the answer. Arguments, result and errors are as for `Client.infer`.

        Do not change the inputs before the call returns.
        """
        flags = request_flags(cache, priority)
        deadline = time.monotonic() + self.timeout_of(timeout_s)
        pool = self._pool(model)
        await pool.acquire(deadline)
        try:
            while True:
                connection = pool.pop_idle() or await self._connected(model, deadline, pool)
                try:
                    return await connection.request(inputs, deadline, flags, trace)
                except Retry as retry:
                    await asyncio.sleep(retry.wait_s(deadline - time.monotonic()))
        finally:
            pool.release()

    def session(self, model: str) -> AsyncSession:
        """Return a session of `model`, like `Client.session`: `async with client.session("vad") as stream`."""
        return AsyncSession(self, model)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "connections_max": self.connections_max}

    async def models(self) -> list[dict[str, Any]]:
        """Return the name, release and state of each model that the daemon serves."""
        connection = await self._connected(None, time.monotonic() + self.timeout_s)
        connection.close()
        return list(connection.conversation.welcome["models"])

    async def metadata(self, model: str) -> dict[str, Any]:
        """Return the description of `model`: release, inputs, outputs, labels."""
        deadline = time.monotonic() + self.timeout_s
        pool = self._pool(model)
        await pool.acquire(deadline)
        try:
            connection = await self._connected(model, deadline, pool)
            pool.give_back(connection)
            return dict(connection.conversation.welcome)
        finally:
            pool.release()

    async def labels(self, model: str) -> list[str]:
        """Return the model's class names by index; empty if it has none. Call this once and keep the result."""
        return [str(label) for label in (await self.metadata(model)).get("labels", ())]

    async def close(self) -> None:
        """Close the idle connections. The connection of a request in progress closes when the request ends."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    def _pool(self, model: str) -> Pool:
        self._check_open()
        check_model(model)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move_to(loop)
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool(self.connections_max)
        return pool

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use `loop` from now on. Drop the connections of the previous loop, which must be closed."""
        if self._loop is not None and not self._loop.is_closed():
            raise RequestError("this client belongs to another event loop; create a client for each loop")
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
        self._loop = loop

    async def _connected(
        self, model: str | None, deadline: float, pool: Pool | None = None, *, session: bool = False
    ) -> Connection:
        """Return a new connection that the daemon has accepted. A session's connection is in no `pool`."""
        refusal: Unavailable | None = None
        while True:
            self._check_open()
            try:
                return await Connection.open(self.path, model, pool, deadline, share=self._share, session=session)
            except DeadlineExceeded as error:
                raise refusal or error from None  # the last refusal is the reason why the time passed
            except Retry as retry:
                refusal = retry.error
                await asyncio.sleep(retry.wait_s(deadline - time.monotonic()))
            except ModelNotFound:
                if model in self._pools:  # an app may pass on any number of its users' names
                    self._pools.pop(model).close()
                raise


class AsyncSession:
    """A session of `model` for `async with`: each request continues the previous one, as in `Session`.

    `AsyncClient.session` creates an AsyncSession. Send one request at a time; a cancelled call ends the session.
    """

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self._connection: Connection | None = None
        self._in_progress = False

    def __reduce__(self) -> NoReturn:
        raise TypeError(SESSION_NOT_COPIED)

    @overload
    async def infer(
        self, inputs: Inputs, *, trace: Literal[False] = False, **options: Unpack[SessionOptions]
    ) -> Outputs: ...

    @overload
    async def infer(
        self, inputs: Inputs, *, trace: Literal[True], **options: Unpack[SessionOptions]
    ) -> InferResponse: ...

    async def infer(
        self, inputs: Inputs, *, timeout_s: float | None = None, priority: Priority = "normal", trace: bool = False
    ) -> Outputs | InferResponse:
        """Send the next chunk and return the answer. Arguments and errors are as for `Session.infer`."""
        flags = request_flags(True, priority)
        deadline = time.monotonic() + self._client.timeout_of(timeout_s)
        if self._in_progress:
            raise RequestError(SESSION_BUSY)
        self._in_progress = True
        try:
            return await self._request(inputs, deadline, flags, trace)
        finally:
            self._in_progress = False

    async def close(self) -> None:
        """Close the session. A request that is in progress in another task raises SessionLost."""
        if self._connection is not None:
            self._connection.fail(session_ended(SESSION_CLOSED))
            self._connection = None

    async def __aenter__(self) -> AsyncSession:
        self._client._pool(self._model)
        deadline = time.monotonic() + self._client.timeout_s
        self._connection = await self._client._connected(self._model, deadline, session=True)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def _request(self, inputs: Inputs, deadline: float, flags: int, trace: bool) -> Outputs | InferResponse:
        connection = self._connection
        if connection is None:
            raise SessionLost("the session has not started, or is closed: use `async with client.session(...)`")
        while True:
            try:
                if connection.closed and not connection.conversation.moved:
                    raise connection.end_error
                if connection.closed:
                    resume = connection.conversation.resume
                    connection = await self._client._connected(self._model, deadline, session=True)
                    if self._connection is None:  # another task has closed the session in the meantime
                        connection.close()
                        raise session_ended(SESSION_CLOSED)
                    self._connection = connection
                    connection.continue_session(resume)
                return await connection.request(inputs, deadline, flags, trace)
            except (Retry, WorkerLost) as error:
                if not connection.conversation.moved:
                    raise session_lost(error) from error
