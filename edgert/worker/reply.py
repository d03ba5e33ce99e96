"""The RESULT frames of one connection.

A model's answers look the same again and again. So the frame of the last answer is kept, and of the next one only
what differs is written into it. Long answers are not copied: their own memory is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from edgert.protocol import wire
from edgert.protocol.arrays import looks_of, places, to_wire

KEPT_BYTES_MAX = 16 * 1024  # up to here a copy is cheaper than more buffers in the system call

Stages = tuple[int, int, int, int, int, int]


class Reply:
    """Makes the frames of one connection's answers, one after the other."""

    def __init__(self) -> None:
        self._numbers: Sequence[int] = ()
        self._looks: tuple[Any, ...] = ()
        self._kept = bytearray()  # empty where no answer is kept
        self._places: list[NDArray[Any]] = []  # where in it each output goes

    def parts(
        self,
        outputs: Sequence[NDArray[Any]],
        numbers: Sequence[int],
        request_id: int,
        flags: int,
        batch: int,
        stages: Stages,
    ) -> tuple[Sequence[wire.Buffer], int]:
        """The frame that says `outputs`, output i as tensor `numbers[i]`, and its size; sent before the next is made.

        `stages` are microseconds, in the header's order.
        """
        looks = looks_of(outputs)
        kept = self._kept
        if kept and looks == self._looks and numbers is self._numbers:
            for place, array in zip(self._places, outputs):  # noqa: B905  # as many as there are looks
                place[...] = array
            wire.VARYING.pack_into(kept, wire.VARYING_OFFSET, flags, request_id, 0, batch)
            wire.STAGES.pack_into(kept, wire.STAGES_OFFSET, *stages)
            return (kept,), len(kept)
        tensors = [to_wire(i, array) for i, array in zip(numbers, outputs, strict=True)]
        parts = wire.frame(wire.RESULT, request_id=request_id, flags=flags, arg=batch, tensors=tensors, stages=stages)
        self._looks, self._numbers = looks, numbers
        size = sum(map(len, parts))
        self._keep(parts, size, outputs)
        return parts, size

    def _keep(self, parts: Sequence[wire.Buffer], size: int, outputs: Sequence[NDArray[Any]]) -> None:
        self._kept, self._places = bytearray(), []
        if size <= KEPT_BYTES_MAX:
            self._kept = bytearray(b"".join(parts))
            self._places = places(outputs, self._kept)
