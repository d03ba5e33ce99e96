"""The limits of one HTTP client, and of all of them together."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http import HTTPStatus

from edgert.http.messages import HttpError

HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100
HEAD_S_MAX = 10.0  # from the first byte of a request to the end of its head
STALL_S = 5.0  # for the next bytes of a body, or until the client reads some of an answer
BODY_S_MIN = 10.0
BODY_BYTES_PER_S_MIN = 256 * 1024
IDLE_S_MAX = 75.0  # between two requests
EVICT_IDLE_S = 1.0  # when all connections are taken, one that is idle for longer gives way to a new one
BODIES_MAX = 2  # bodies of the largest size in memory at once
STOP_S_MAX = 3.0


@dataclass(frozen=True)
class Limits:
    """The limits of one server; the configuration sets the largest body and the number of connections at once."""

    body_bytes_max: int
    connections_max: int
    head_s_max: float = HEAD_S_MAX
    stall_s: float = STALL_S
    idle_s_max: float = IDLE_S_MAX

    def body_s_max(self, size_bytes: int) -> float:
        """Return how long a body of this size may take to arrive."""
        return BODY_S_MIN + size_bytes / BODY_BYTES_PER_S_MIN


class BodyBudget:
    """A limit on the bytes of all bodies together. Any thread may call every method."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes, self._taken = size_bytes, 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Count `size_bytes`. Raises HttpError (503) if the bodies would exceed the limit."""
        with self._lock:
            if self._taken + size_bytes > self._size_bytes:
                raise HttpError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"requests of {self._taken} bytes are in progress, the limit is {self._size_bytes}; try again",
                    retry_after_s=1.0,
                )
            self._taken += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._taken -= size_bytes
