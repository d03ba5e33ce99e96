"""What one HTTP client may take of the process, and all of them together."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http import HTTPStatus

from edgert.http.messages import HttpError

HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100
HEAD_S_MAX = 10.0  # from the first byte of a request to the end of its head
STALL_S = 5.0  # for the next bytes of a body, or for the client to take some of an answer
BODY_S_MIN = 10.0
BODY_BYTES_PER_S_MIN = 256 * 1024
IDLE_S_MAX = 75.0  # between two requests
EVICT_IDLE_S = 1.0  # a connection idle for this long gives way to a new one when all are taken
BODIES_MAX = 2  # bodies of the largest size that are held at once
STOP_S_MAX = 3.0


@dataclass(frozen=True)
class Limits:
    """What the configuration decides: the largest body, and how many connections there are at once."""

    body_bytes_max: int
    connections_max: int

    def body_s_max(self, size_bytes: int) -> float:
        """How long a body of this size may take to arrive."""
        return BODY_S_MIN + size_bytes / BODY_BYTES_PER_S_MIN


class BodyBudget:
    """The bytes that all bodies together may take. Every method may be called from any thread."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes, self._taken = size_bytes, 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Raises HttpError (503) where others hold too much now."""
        with self._lock:
            if self._taken + size_bytes > self._size_bytes:
                raise HttpError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"requests of {self._taken} bytes are under way, the limit is {self._size_bytes}; try again",
                    retry_after_s=1.0,
                )
            self._taken += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._taken -= size_bytes
