"""The memory of a session: the data for its next request, and how the items of a request use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.manifest import Manifest
from edgert.errors import BundleError
from edgert.processing.preprocessors import InputPreprocessor
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.protocol.wire import WireTensor
from edgert.tensors import DATATYPES, batchable

Arrays = list[NDArray[Any]]


class Memory(NamedTuple):
    """The data that a session keeps for its next request.

    Attributes:
        state: The model's state, in the manifest's order; each array is one item.
        held: The values that the next window needs.
        skip: How many values at the start of the next request belong to no window.
        shares: The class scores of the last windows; None if answers are not smoothed.
    """

    state: tuple[NDArray[Any], ...]
    held: NDArray[np.float32]
    skip: int = 0
    shares: NDArray[np.float32] | None = None

    @property
    def arrays(self) -> Arrays:
        """All arrays, in the order of a MOVED frame."""
        return [*self.state, self.held, *(() if self.shares is None else (self.shares,))]

    def with_arrays(self, arrays: Arrays, skip: int) -> Memory:
        """Return a memory of the same form with other content."""
        count = len(self.state)
        return Memory(tuple(arrays[:count]), arrays[count], skip, None if self.shares is None else arrays[count + 1])


class MemoryForm:
    """The form of the memory of a model's sessions.

    Attributes:
        pre: The preprocessor of a signal with windows; None for other models.
        in_turn: Whether the items of a request run one after the other.
        first: The initial memory of a session.
        size_bytes: The largest size of a memory.
    """

    def __init__(self, manifest: Manifest, pre: InputPreprocessor | None) -> None:
        inputs = {spec.name: (i, spec) for i, spec in enumerate(manifest.inputs)}
        outputs = [spec.name for spec in manifest.outputs]
        self._inputs = [inputs[binding.input][0] for binding in manifest.state]
        self._outputs = [outputs.index(binding.output) for binding in manifest.state]
        self.pre = pre if isinstance(pre, SignalPreprocessor) and pre.step else None
        self.in_turn = bool(manifest.state) or (self.pre is not None and not batchable(manifest.inputs))
        specs = [inputs[binding.input][1] for binding in manifest.state]
        zeros = tuple(np.zeros((1, *spec.item_shape), spec.dtype) for spec in specs)
        rest = np.zeros(0, np.float32) if self.pre is None else self.pre.nothing_held
        held_max = 0 if self.pre is None else self.pre.held_max
        self.first = Memory(zeros, rest)
        self._lengths = [*(1 for _ in zeros), held_max]
        if (rule := manifest.classify) is not None and rule.smooth is not None and self.pre is not None:
            classes = next(spec.shape[-1] for spec in manifest.outputs if spec.name == rule.output)
            if classes == -1:
                raise BundleError(
                    f"smoothing needs a fixed number of classes; the number of output {rule.output!r} is open"
                )
            self.first = self.first._replace(shares=np.zeros((0, classes), np.float32))
            self._lengths.append(rule.smooth.windows - 1)
        sizes = zip(self.first.arrays, self._lengths, strict=True)
        self.size_bytes = sum(math.prod((length, *array.shape[1:])) * array.itemsize for array, length in sizes)

    @property
    def has_memory(self) -> bool:
        """Whether a request of this model can depend on earlier requests."""
        return bool(self._inputs) or self.pre is not None

    def fits(self, tensors: Sequence[WireTensor]) -> bool:
        """Return whether tensors have the form of a session's memory."""
        arrays = self.first.arrays
        return len(tensors) == len(arrays) and all(
            (tensor.number, tensor.datatype) == (i, DATATYPES[array.dtype.name])
            and len(tensor.shape) == array.ndim
            and tensor.shape[1:] == array.shape[1:]
            and (tensor.shape[0] == length if i < len(self._inputs) else tensor.shape[0] <= length)
            for i, (tensor, array, length) in enumerate(zip(tensors, arrays, self._lengths, strict=True))
        )

    def with_state(self, arrays: Sequence[NDArray[Any]], state: Sequence[NDArray[Any]]) -> Arrays:
        """Return the model's inputs: the arrays of a request, with the state inserted."""
        whole = list(arrays)
        for i, array in sorted(zip(self._inputs, state, strict=True), key=lambda pair: pair[0]):
            whole.insert(i, array)
        return whole

    def state_of(self, outputs: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        """Return the state in one item's outputs, as copies."""
        return tuple(outputs[i].copy() for i in self._outputs)
