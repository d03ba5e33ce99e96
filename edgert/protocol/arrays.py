"""NumPy arrays as tensors of the local protocol, and back; for both ends of the socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import ProtocolError
from edgert.protocol import wire
from edgert.tensors import DATATYPES, NUMPY_NAMES

FILE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF")  # the first bytes of JPEG, PNG and WAV files
COPY_BYTES_MAX = 4096  # up to this size, a copy is cheaper than another buffer in the system call

# This is a cache, because connections send the same few shapes repeatedly.
_DESCRIPTORS: dict[tuple[int, np.dtype[Any], tuple[int, ...]], bytes] = {}
DESCRIPTORS_MAX = 1024

_DTYPES = {datatype: np.dtype(name) for datatype, name in NUMPY_NAMES.items()}


def to_wire(number: int, array: NDArray[Any]) -> wire.OutTensor:
    """Return `array` as tensor `number` of a frame: a copy of a small array, else the array's own memory."""
    shape = array.shape
    key = (number, array.dtype, shape)
    described = _DESCRIPTORS.get(key)
    if described is None:
        described = _describe(key)
    if array.nbytes <= COPY_BYTES_MAX:
        return wire.OutTensor(described, array.tobytes())
    return wire.OutTensor(described, bytes_of(array))


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the memory of `array`, or of a copy if the array is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def from_wire(tensor: wire.WireTensor) -> NDArray[Any]:
    """Return a view of a received tensor; it is valid as long as the frame's buffer. Raises ProtocolError."""
    try:
        return np.frombuffer(tensor.data, _DTYPES[tensor.datatype]).reshape(tensor.shape)
    except ValueError as error:  # one axis is 0, and the product of the others is above 2**63
        raise ProtocolError(f"NumPy cannot hold the shape {list(tensor.shape)} of an empty tensor: {error}") from error


def _describe(key: tuple[int, np.dtype[Any], tuple[int, ...]]) -> bytes:
    number, dtype, shape = key
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if len(_DESCRIPTORS) >= DESCRIPTORS_MAX:
        _DESCRIPTORS.clear()
    described = _DESCRIPTORS[key] = wire.descriptor(number, DATATYPES[dtype.name], shape, nbytes)
    return described


def signature_of(arrays: Sequence[NDArray[Any]]) -> tuple[Any, ...]:
    """Return the shapes and dtypes of arrays, to compare them with other arrays."""
    if len(arrays) == 1:
        return arrays[0].shape, arrays[0].dtype
    return tuple((array.shape, array.dtype) for array in arrays)
