"""Fits requests to the sizes of an artifact: pads to buckets, and splits batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert.errors import RequestError
from edgert.tensors import TensorSpec

Arrays = list[NDArray[Any]]


def load_session(artifact: LocalArtifact, options: EngineOptions) -> Session:
    """Open the artifact, with padding if it has buckets. Raises EngineMissing, EngineFailed."""
    session = engine_by_name(artifact.engine).load(artifact, options)
    return session if artifact.buckets is None else PaddedSession(session, artifact.buckets)


class Padder:
    """Pads the inputs of a model and cuts its outputs. Both are lists in the model's order."""

    def __init__(self, buckets: Buckets, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self.buckets = buckets
        names = [spec.name for spec in inputs]
        self._inputs = [(names.index(place.name), place) for place in buckets.inputs]
        names = [spec.name for spec in outputs]
        self._outputs = [(names.index(place.name), place) for place in buckets.outputs]

    def length(self, inputs: Sequence[NDArray[Any]]) -> int:
        """Return the length of a request. Raises RequestError if its inputs have different lengths."""
        lengths = [int(inputs[i].shape[place.axis]) for i, place in self._inputs]
        if len(set(lengths)) != 1:
            raise RequestError(f"the inputs differ in length along axis {self.buckets.axis!r}: {lengths}")
        return lengths[0]

    def padded(self, inputs: Sequence[NDArray[Any]]) -> Arrays:
        """Return the inputs, padded to the smallest bucket that is long enough. Raises RequestError."""
        length = self.length(inputs)
        size = self.buckets.size_for(length)
        arrays = list(inputs)
        if size == length:
            return arrays
        for i, place in self._inputs:
            shape = list(arrays[i].shape)
            shape[place.axis] = size
            whole = np.full(shape, place.value, arrays[i].dtype)
            whole[_until(place.axis, length)] = arrays[i]
            arrays[i] = whole
        return arrays

    def trimmed(self, inputs: Sequence[NDArray[Any]], length: int) -> Arrays:
        """Return the inputs without padding, cut to `length`."""
        arrays = list(inputs)
        for i, place in self._inputs:
            arrays[i] = np.ascontiguousarray(arrays[i][_until(place.axis, length)])
        return arrays

    def cut(self, outputs: Sequence[NDArray[Any]], length: int) -> Arrays:
        """Return the outputs, cut to their length for inputs of `length`."""
        arrays = list(outputs)
        for i, place in self._outputs:
            if arrays[i].shape[place.axis] > (end := place.length(length)):
                arrays[i] = np.ascontiguousarray(arrays[i][_until(place.axis, end)])
        return arrays


class PaddedSession(Session):
    """A session that pads inputs to a bucket, so that its engine sees only the buckets' sizes."""

    def __init__(self, session: Session, buckets: Buckets) -> None:
        self.inputs, self.outputs = session.inputs, session.outputs
        self.padder = Padder(buckets, self.inputs, self.outputs)
        self._session = session

    def run(self, tensors: Sequence[NDArray[Any]]) -> Arrays:
        length = self.padder.length(tensors)
        return self.padder.cut(self._session.run(self.padder.padded(tensors)), length)

    def release_memory(self, sample: Sequence[NDArray[Any]]) -> None:
        self._session.release_memory(self.padder.padded(sample))

    def close(self) -> None:
        self._session.close()


def in_pieces(session: Session, tensors: Sequence[NDArray[Any]], most: int) -> Arrays:
    """Run a batch of more than `most` items in several runs and return the joined outputs."""
    count = len(tensors[0])
    pieces = [session.run([array[i : i + most] for array in tensors]) for i in range(0, count, most)]
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def _until(axis: int, end: int) -> tuple[slice, ...]:
    return (*(slice(None) for _ in range(axis)), slice(0, end))
