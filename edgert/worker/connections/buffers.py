"""The receive buffers of a worker's connections: the limit of their memory, and their reuse."""

from __future__ import annotations

import threading
from typing import NamedTuple

from edgert.errors import Overloaded
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.protocol.frame_builder import FrameBuilder
from edgert.worker.pipeline.app_tensors import ModelInputs

FIRST_BUFFER_BYTES = 8192
BUFFERS_BYTES_MAX = 256 * 1024**2  # the receive buffers of all connections of a worker together
KEPT_SHARE = 1 / 2  # beyond this share of BUFFERS_BYTES_MAX, buffers are released after each answer


class BufferBudget:
    """Limits the receive buffers of all connections of one worker, for any sizes that clients announce.

    A connection keeps its buffer from one frame to the next, unless the budget is `scarce`.
    """

    def __init__(self, size_bytes_max: int = BUFFERS_BYTES_MAX) -> None:
        self._left_bytes = size_bytes_max
        self._scarce_bytes = size_bytes_max * (1 - KEPT_SHARE)
        self.scarce = False
        self._lock = threading.Lock()

    def resize(self, old_bytes: int, new_bytes: int) -> None:
        """Count a buffer before it changes its size. Raises Overloaded if too little memory is left."""
        with self._lock:
            if new_bytes - old_bytes > self._left_bytes:
                raise Overloaded("the requests of all clients fill the daemon's buffers; try again", retry_after_s=0.2)
            self._left_bytes += old_bytes - new_bytes
            self.scarce = self._left_bytes < self._scarce_bytes


class SpareBuffers(NamedTuple):
    """The buffers of a connection that has ended, for the next connection.

    Two clients often send frames of the same form, so the arrays of the last request's tensors stay with the buffers:
    `inputs` are the arrays of `tensors`.
    """

    frames: FrameBuffer
    reply: FrameBuilder
    tensors: tuple[wire.WireTensor, ...] | None = None
    inputs: ModelInputs | None = None

    @classmethod
    def new(cls, frame_bytes_max: int, budget: BufferBudget) -> SpareBuffers:
        """Return new buffers for frames of at most `frame_bytes_max`; `budget` counts their growth."""
        return cls(FrameBuffer(frame_bytes_max, FIRST_BUFFER_BYTES, budget.resize), FrameBuilder(wire.RESULT))
