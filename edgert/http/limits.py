"""The limits of one HTTP client, and of all clients together."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100
# The wait for a connection's first byte, and the time from a request's first byte to the end of its head.
HEAD_S_MAX = 10.0
STALL_S = 5.0  # the longest wait for the next bytes of a body, or for the client to read more of an answer
BODY_S_MIN = 10.0
BODY_BYTES_PER_S_MIN = 256 * 1024
IDLE_S_MAX = 75.0  # the wait for the next request
# These two limits apply if another client needs the place.
NEXT_HEAD_S = 0.1  # the time in which an answered client must send the head of its next request
STILL_S_MAX = 1.0  # the longest pause of a body or an answer whose earlier bytes were fast
# Places beyond connections_max. They answer requests for health and figures while connections_max connections infer.
# Under attack, a client must send its first bytes before new connections fill these places.
SPARE_PLACES = 64
BODIES_MAX = 2  # how many bodies of the largest size may be in memory at once
STOP_S_MAX = 3.0  # for the requests in progress
STOP_LINGER_S = 0.5  # at a stop, the time for a client that still uploads to read why its connection ends
RELEASE_AFTER_S = 10.0  # after this time without an inference, the memory of earlier inferences is released


@dataclass(frozen=True)
class Limits:
    """The limits of one server; the configuration sets `body_bytes_max` and `connections_max`."""

    body_bytes_max: int
    connections_max: int
    head_s_max: float = HEAD_S_MAX
    stall_s: float = STALL_S
    idle_s_max: float = IDLE_S_MAX
    release_after_s: float = RELEASE_AFTER_S

    @property
    def bodies_bytes_max(self) -> int:
        return BODIES_MAX * self.body_bytes_max

    def body_s_max(self, size_bytes: int) -> float:
        """Return the longest time in which a body of this size may arrive."""
        return BODY_S_MIN + size_bytes / BODY_BYTES_PER_S_MIN
