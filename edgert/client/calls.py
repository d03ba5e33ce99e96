"""What the blocking and the asyncio client have in common about a call: its options, and when it is made again."""

from __future__ import annotations

import time
from typing import Any, Literal

from edgert.client.conversation import RETRY_PAUSE_S
from edgert.errors import DeadlineExceeded, RequestError, Unavailable
from edgert.protocol import wire

IDLE_CONNECTIONS_MAX = 32
TRANSPORTS = ("auto", "socket")

Priority = Literal["normal", "high"]


def check_transport(transport: str) -> str:
    """`transport`, where it is one that there is. Raises RequestError."""
    if transport not in TRANSPORTS:
        raise RequestError(f"transport {transport!r} is not known; give one of {', '.join(TRANSPORTS)}")
    return transport


def hello(model: str | None, transport: str) -> bytes:
    """The frame that begins a connection: to a model, with shared memory where `transport` allows it."""
    asked: dict[str, Any] = {"model": model}
    if transport == "auto" and model is not None:
        asked["shared"] = True
    return wire.json_frame(wire.HELLO, asked)


def priority_flag(priority: str) -> int:
    if priority != "high":
        raise RequestError(f"priority {priority!r} is not known; give normal or high")
    return wire.FLAG_HIGH_PRIORITY


class Again(Exception):
    """The request reached no engine; it may go over a new connection, after what `error` asks for."""

    def __init__(self, error: Unavailable | None = None) -> None:
        super().__init__()
        self.error = error


def again_wait_s(again: Again, deadline: float) -> float:
    """How long to wait before asking again (0: not at all). Raises what `again` holds when it is too late."""
    if again.error is None:  # the connection had moved: the next one is ready now
        if time.monotonic() >= deadline:
            raise DeadlineExceeded("the time-out passed while the model moved to another worker; send it again")
        return 0.0
    wait_s = again.error.retry_after_s or RETRY_PAUSE_S
    if time.monotonic() + wait_s >= deadline:
        raise again.error
    return wait_s
