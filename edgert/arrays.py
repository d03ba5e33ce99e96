"""NumPy arrays as tensors of the local protocol, and back. Both ends of the socket use it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert import wire
from edgert.tensors import DATATYPES, NUMPY_NAMES

COPY_BYTES_MAX = 4096  # below this, one copy is cheaper than another buffer in the system call

_DTYPES = {datatype: np.dtype(name) for datatype, name in NUMPY_NAMES.items()}


def to_wire(number: int, array: NDArray[Any]) -> wire.OutTensor:
    """`array` as tensor `number` of a frame. Small arrays are copied; of others the memory itself is sent."""
    if array.nbytes <= COPY_BYTES_MAX:
        data: wire.Buffer = array.tobytes()
    else:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return wire.OutTensor(_descriptor(number, array.dtype, array.shape), data)


def from_wire(tensor: wire.WireTensor) -> NDArray[Any]:
    """A view over a received tensor; valid as long as the frame's buffer is."""
    return np.frombuffer(tensor.data, _DTYPES[tensor.datatype]).reshape(tensor.shape)


@lru_cache(maxsize=1024)
def _descriptor(number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return wire.descriptor(number, DATATYPES[dtype.name], shape, nbytes)
