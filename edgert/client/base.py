"""The common part of the blocking and the asyncio client: settings, and the options of a call."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from edgert.errors import RequestError
from edgert.protocol import wire
from edgert.state_dir import default_socket

IDLE_CONNECTIONS_MAX = 32
TRANSPORTS = ("auto", "socket")

Priority = Literal["normal", "high"]


class SessionOptions(TypedDict, total=False):
    """The options of a session's `infer`: the time-out, and the priority over other requests."""

    timeout_s: float | None
    priority: Priority


class CallOptions(SessionOptions, total=False):
    """The options of `infer`: the options of a session, and whether caches may answer."""

    cache: bool


class BaseClient:
    """The settings of a client of the daemon at `path`."""

    def __init__(self, path: str | os.PathLike[str] | None, timeout_s: float, transport: str) -> None:
        if transport not in TRANSPORTS:
            raise RequestError(f"transport {transport!r} is not known; give one of {', '.join(TRANSPORTS)}")
        check_timeout(timeout_s)
        self.path = Path(path) if path is not None else default_socket()
        self.timeout_s = timeout_s
        self.transport = transport
        self._share = transport == "auto"
        self._closed = False

    def __reduce__(self) -> tuple[Callable[[], BaseClient], tuple[()]]:
        """Pickle only the settings. A copy of the client opens its own connections, in any process."""
        return partial(type(self), **self._settings()), ()

    def _settings(self) -> dict[str, Any]:
        return {"path": self.path, "timeout_s": self.timeout_s, "transport": self.transport}

    def timeout_of(self, timeout_s: float | None) -> float:
        """Return the time-out of a request: `timeout_s`, else the client's time-out. Raises RequestError."""
        if timeout_s is None:
            return self.timeout_s
        check_timeout(timeout_s)
        return timeout_s

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("this client is closed; create a new one")


def check_timeout(timeout_s: float) -> None:
    """Raise RequestError unless a time-out is a number of seconds, 0 or more."""
    try:
        if timeout_s >= 0:  # false for nan
            return
    except TypeError:
        pass
    raise RequestError(f"timeout_s is {timeout_s!r}; give seconds, 0 or more, or math.inf to wait for ever")


def check_model(model: str) -> None:
    """Raise RequestError unless the name of a model is a string."""
    if not isinstance(model, str):
        raise RequestError(f"the name of the model is {repr(model)[:80]}; give a str (models() lists the names)")


def request_flags(cache: bool, priority: str) -> int:
    """Return the flags of an INFER frame. Raises RequestError."""
    flags = 0 if cache else wire.FLAG_NO_CACHE
    if priority == "normal":
        return flags
    if priority != "high":
        raise RequestError(f"priority {priority!r} is not known; give normal or high")
    return flags | wire.FLAG_HIGH_PRIORITY
