"""CUDA for TensorRT, through `cuda-bindings`: memory, copies and one stream on GPU 0.

This module has not run on a GPU yet.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from numpy.typing import NDArray

from edgert.errors import EngineFailed, EngineMissing


class Cuda:
    """One stream on GPU 0. A copy only joins the stream's queue; `synchronize` waits for the queue.

    All threads of the process share one context of the GPU. Raises EngineMissing without `cuda-bindings`, EngineFailed
    without a GPU.

    Attributes:
        stream: The stream's handle for TensorRT.
        compute_capability: The GPU's version as text, for example "8.7".
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise EngineMissing(
                f"TensorRT needs cuda-bindings, which cannot be imported here ({error}); install it with: "
                "pip install 'edgert[tensorrt]'"
            ) from error
        self._runtime = runtime
        self._cleanup = ExitStack()
        attribute = runtime.cudaDeviceAttr
        major = self._call(runtime.cudaDeviceGetAttribute, attribute.cudaDevAttrComputeCapabilityMajor, 0)
        minor = self._call(runtime.cudaDeviceGetAttribute, attribute.cudaDevAttrComputeCapabilityMinor, 0)
        self.compute_capability = f"{major}.{minor}"
        stream = self._call(runtime.cudaStreamCreate)
        self._cleanup.callback(runtime.cudaStreamDestroy, stream)
        self.stream = int(stream)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory on the GPU, which `close` frees."""
        address = self._call(self._runtime.cudaMalloc, size_bytes)
        self._cleanup.callback(self._runtime.cudaFree, address)
        return int(address)

    def copy_in(self, address: int, array: NDArray[Any]) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call(self._runtime.cudaMemcpyAsync, address, array.ctypes.data, array.nbytes, kind, self.stream)

    def copy_out(self, array: NDArray[Any], address: int) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call(self._runtime.cudaMemcpyAsync, array.ctypes.data, address, array.nbytes, kind, self.stream)

    def synchronize(self) -> None:
        self._call(self._runtime.cudaStreamSynchronize, self.stream)

    def close(self) -> None:
        self._cleanup.close()

    def _call(self, function: Any, *args: Any) -> Any:
        """Call a function of the runtime, which returns (status, value) or (status,)."""
        status, *values = function(*args)
        if int(status) != 0:
            reason = getattr(status, "name", status)
            raise EngineFailed(f"CUDA's {function.__name__} failed: {reason}; check that the GPU and its driver work")
        return values[0] if values else None
