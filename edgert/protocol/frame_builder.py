"""Builds the frames that one end of a connection sends, one after the other.

Theory of operation: the requests of a connection usually have the same shapes, and so have the answers. So the builder
stores the last frame, and writes only the different fields for the next frame. It stores a short frame whole, with
copies of the arrays. It copies the arrays of a long frame into shared memory, if the connection has shared memory.
Otherwise the arrays are sent from their own memory, after the stored head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.protocol import wire
from edgert.protocol.arrays import bytes_of, signature_of, to_wire
from edgert.protocol.sharing import SHARE_BYTES_MIN

KEPT_BYTES_MAX = 16 * 1024  # up to this frame size, a copy is cheaper than more buffers in the system call

Arrays = Sequence[NDArray[Any]]
_write_varying, _write_stages = wire.VARYING.pack_into, wire.STAGES.pack_into


class FrameBuilder:
    """Builds frames of one `kind`. Send each frame before you build the next one.

    `shared` is the half of the shared memory that this end writes. After each call, `frame_bytes` is the size of the
    whole frame, and `sent_bytes` is the number of bytes to send through the socket.
    """

    def __init__(self, kind: int, model_id: int = 0, shared: memoryview | None = None) -> None:
        self._kind = kind
        self._model_id = model_id
        self._shared = shared
        self.frame_bytes = self.sent_bytes = 0
        self._signature: tuple[Any, ...] | None = None  # None: no frame is kept
        self._numbers: Sequence[int] = ()
        self._head = bytearray()
        self._shared_flag = 0
        self._targets: list[NDArray[Any]] | None = None  # the memory that arrays are copied to; None for no copies

    def parts(
        self,
        arrays: Arrays,
        numbers: Sequence[int],
        flags: int,
        request_id: int,
        arg: int,
        stages: Sequence[int] = wire.NO_STAGES,
    ) -> Sequence[wire.Buffer]:
        """Return the buffers to send: `arrays[i]` as tensor `numbers[i]`. Do not change `numbers` later."""
        # The first case is the result of `signature_of`, without the time of a call.
        signature = (arrays[0].shape, arrays[0].dtype) if len(arrays) == 1 else signature_of(arrays)
        if signature != self._signature or numbers is not self._numbers:
            return self._compose(arrays, numbers, flags, request_id, arg, stages)
        _write_stages(self._head, wire.STAGES_OFFSET, *stages)
        return self.update(arrays, flags, request_id, arg)

    def update(self, arrays: Arrays, flags: int, request_id: int, arg: int) -> Sequence[wire.Buffer]:
        """Return the buffers of the next frame, which has the form and the stages of the last frame.

        `arrays` have the dtypes and shapes of the last frame's arrays, or lack their first axis of length 1.
        """
        head = self._head
        _write_varying(head, wire.VARYING_OFFSET, flags | self._shared_flag, request_id, self._model_id, arg)
        if self._targets is None:
            return self._with_arrays(arrays)
        for target, array in zip(self._targets, arrays):  # noqa: B905  # both have the same length
            target[...] = array
        return (head,)

    def kept_array(self) -> tuple[NDArray[Any], bytearray] | None:
        """Return the memory of the last frame's array, and the frame; None unless short with one array."""
        if self._signature is None or self._targets is None or len(self._targets) != 1 or self._shared_flag:
            return None
        return self._targets[0], self._head

    def _compose(
        self, arrays: Arrays, numbers: Sequence[int], flags: int, request_id: int, arg: int, stages: Sequence[int]
    ) -> Sequence[wire.Buffer]:
        self._signature = None
        tensors = [to_wire(number, array) for number, array in zip(numbers, arrays, strict=True)]
        parts: Sequence[wire.Buffer] = wire.frame(
            self._kind,
            request_id=request_id,
            model_id=self._model_id,
            flags=flags,
            arg=arg,
            tensors=tensors,
            stages=stages,
        )
        self.frame_bytes = self.sent_bytes = sum(map(len, parts))
        header = None
        if self._shared is not None and self.frame_bytes >= SHARE_BYTES_MIN:
            header = wire.share(parts, self._shared)
        self._shared_flag = 0
        if header is not None:
            assert self._shared is not None  # the kept header says that the arrays are in shared memory
            self._head = bytearray(header)
            self._shared_flag = wire.FLAG_SHARED
            self.sent_bytes = len(header)
            self._targets = _targets(arrays, self._shared)
            parts = (self._head,)
        elif self.frame_bytes <= KEPT_BYTES_MAX:
            self._head = bytearray(b"".join(parts))
            self._targets = _targets(arrays, self._head)
        else:
            self._head = bytearray(b"".join(parts[:2]))  # header and descriptors
            self._targets = None
        self._signature = signature_of(arrays)
        self._numbers = numbers
        return parts

    def _with_arrays(self, arrays: Arrays) -> list[wire.Buffer]:
        """Return the head, and the arrays in their own memory."""
        parts: list[wire.Buffer] = [self._head]
        for array in arrays:
            parts.append(bytes_of(array))
            if array.nbytes % wire.ALIGNMENT:
                parts.append(bytes(-array.nbytes % wire.ALIGNMENT))
        return parts


def _targets(arrays: Arrays, memory: bytearray | memoryview) -> list[NDArray[Any]]:
    """Return a view of each array in `memory`, which contains a frame of these arrays."""
    targets, at = [], wire.HEADER_BYTES + wire.DESCRIPTOR_BYTES * len(arrays)
    for array in arrays:
        targets.append(np.frombuffer(memory, array.dtype, array.size, at).reshape(array.shape))
        at += wire.aligned(array.nbytes)
    return targets
