"""The asyncio client of the daemon's local socket: what `Client` does, without blocking the event loop.

Whoever stops waiting (cancelled, out of time) closes the connection: a late answer meets nobody else's request.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from numpy.typing import NDArray

from edgert.client.aio_connection import Connection, Pool
from edgert.client.calls import Again, Priority, again_wait_s, check_transport, priority_flag
from edgert.client.conversation import Inputs
from edgert.config import default_socket
from edgert.errors import DaemonUnreachable, RequestError, Unavailable
from edgert.protocol import wire
from edgert.tensors import InferResponse

CONNECTIONS_MAX = 64


class AsyncClient:
    """Asks the daemon at `path` (default: $EDGERT_SOCKET, else where this machine's daemon listens).

    One client serves any number of tasks of one event loop: each request under way has a connection of its own,
    at most `connections_max` a model; those beyond wait their turn. `timeout_s` bounds every call, waiting for a
    turn, connecting and waiting for a restarting worker included. `transport` is that of `Client`. A call that is
    cancelled takes its connection along and leaves the client as it was.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 30.0,
        connections_max: int = CONNECTIONS_MAX,
        transport: str = "auto",
    ) -> None:
        if connections_max < 1:
            raise RequestError(f"connections_max is {connections_max}; give at least 1")
        self.path = Path(path) if path is not None else default_socket()
        self.timeout_s = timeout_s
        self.connections_max = connections_max
        self.transport = check_transport(transport)
        self._pools: dict[str, Pool] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @overload
    async def infer(
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
    async def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
        trace: Literal[True],
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
    ) -> dict[str, NDArray[Any]] | InferResponse:
        """Answer one batch: arrays by output name. Inputs, options and errors are those of `Client.infer`.

        The inputs must not be changed before the call returns.
        """
        flags = 0 if cache else wire.FLAG_NO_CACHE
        if priority != "normal":
            flags |= priority_flag(priority)
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        pool = self._pool(model)
        await pool.enter(deadline)
        try:
            while True:
                try:
                    connection = pool.idle_one() or await self._connect(model, deadline)
                    return await connection.ask(inputs, deadline, flags, trace)
                except Again as again:
                    await _pause(again, deadline)
        finally:
            pool.leave()

    async def request(
        self,
        model: str,
        inputs: Inputs,
        *,
        timeout_s: float | None = None,
        cache: bool = True,
        priority: Priority = "normal",
    ) -> InferResponse:
        """As `infer`, with the release that answered, the stage times, the batch and whether the cache did."""
        return await self.infer(model, inputs, timeout_s=timeout_s, cache=cache, priority=priority, trace=True)

    async def models(self) -> list[dict[str, Any]]:
        """What the daemon serves: name, release and state of each model."""
        self._check_open()
        connection = await Connection.opened(self.path, None, None, time.monotonic() + self.timeout_s, self.transport)
        connection.close()
        return list(connection.welcome["models"])

    async def metadata(self, model: str) -> dict[str, Any]:
        """What the daemon says about `model`: release, inputs, outputs, labels."""
        deadline = time.monotonic() + self.timeout_s
        pool = self._pool(model)
        await pool.enter(deadline)
        try:
            while True:
                try:
                    connection = await self._connect(model, deadline)
                except Again as again:
                    await _pause(again, deadline)
                    continue
                pool.give_back(connection)
                return dict(connection.welcome)
        finally:
            pool.leave()

    async def labels(self, model: str) -> list[str]:
        """The names of the model's classes by index, empty where its bundle has none. Ask once and keep them."""
        return [str(label) for label in (await self.metadata(model)).get("labels", ())]

    async def close(self) -> None:
        """Close the idle connections; those of requests under way close when these end."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _pool(self, model: str) -> Pool:
        self._check_open()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move_to(loop)
        pool = self._pools.get(model)
        if pool is None:
            pool = self._pools[model] = Pool(self.connections_max)
        return pool

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this client is closed; make a new one")

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connections belong to the loop that they were made on."""
        if self._loop is not None and not self._loop.is_closed():
            raise RequestError("this client belongs to another event loop; make one for each loop")
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
        self._loop = loop

    async def _connect(self, model: str, deadline: float) -> Connection:
        self._check_open()
        try:
            return await Connection.opened(self.path, model, self._pools[model], deadline, self.transport)
        except Unavailable as error:
            if isinstance(error, DaemonUnreachable) or error.retry_after_s is None:
                raise
            raise Again(error) from error


async def _pause(again: Again, deadline: float) -> None:
    wait_s = again_wait_s(again, deadline)
    if wait_s:
        await asyncio.sleep(wait_s)
