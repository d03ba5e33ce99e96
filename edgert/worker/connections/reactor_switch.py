"""The decision whether a connection with its own thread should move to the reactor."""

from __future__ import annotations

from edgert.protocol import wire
from edgert.worker.connections.connection import Connection

# A connection with larger frames keeps its own thread: receiving them may block, and the reactor must not block.
REACTOR_FRAME_BYTES_MAX = 1024**2
# A connection with fewer requests stays out of the reactor, and does not move other connections there: some apps
# connect for each request.
REACTOR_REQUESTS_MIN = 16


class ReactorSwitch:
    """Tells when connections should move to the reactor: there are `many`, and they take turns.

    A connection takes turns if another connection got the `last` answer before the connection's request. Only the
    requests from the REACTOR_REQUESTS_MIN-th on count, because some apps connect for each request.
    """

    __slots__ = ("last", "many")

    def __init__(self) -> None:
        self.many = False
        self.last: Connection | None = None

    def count_turn(self, connection: Connection, request: wire.Frame) -> bool:
        """Count an answer after another connection's answer; return whether `connection` should move.

        A high-priority client keeps its thread: only requests queued in the batcher can be reordered. A client of large
        frames also keeps its thread.
        """
        connection.turns += 1
        if connection.turns < REACTOR_REQUESTS_MIN:
            return False
        self.last = connection
        frames, high = connection.frames, request.flags & wire.FLAG_HIGH_PRIORITY
        return self.many and not (frames.more or high or frames.size_bytes > REACTOR_FRAME_BYTES_MAX)
