"""The part of CUDA that TensorRT needs: memory, copies and one stream on GPU 0.

The first choice is `cuda-bindings`, because it has wheels for x86-64 and aarch64. The second choice is `pycuda`, which
the device must compile. Only `open_cuda` imports these packages. This module has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from numpy.typing import NDArray

from edgert.errors import EngineFailed, EngineMissing


class Cuda(Protocol):
    """One stream on one GPU. A copy only joins the stream's queue; `synchronize` waits for the queue.

    Attributes:
        stream: The stream's handle for TensorRT.
        compute_capability: The GPU's version as text, for example "8.7".
    """

    stream: int
    compute_capability: str

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory on the GPU, which `close` frees."""
        ...

    def copy_in(self, address: int, array: NDArray[Any]) -> None: ...

    def copy_out(self, array: NDArray[Any], address: int) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def open_cuda() -> Cuda:
    """Open GPU 0 with the first installed binding. Raises EngineMissing, or EngineFailed without a GPU."""
    try:
        return BindingsCuda(_cuda_runtime())
    except ImportError as error:
        reason = f"cuda-bindings: {error}"
    try:
        import pycuda.driver
    except ImportError as error:
        raise EngineMissing(
            f"TensorRT needs a CUDA binding, and none can be imported here ({reason}; pycuda: {error}); install "
            "cuda-bindings with: pip install 'edgert[tensorrt]', or compile pycuda with: pip install 'edgert[pycuda]'"
        ) from error
    return PycudaCuda(pycuda.driver)


class BindingsCuda:
    """`cuda-bindings`: the CUDA runtime API. All threads of the process share one context of GPU 0."""

    def __init__(self, runtime: Any) -> None:
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


class PycudaCuda:
    """`pycuda`: the driver API.

    A context belongs to one thread at a time, so each call makes the context current in its own thread.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        try:
            driver.init()
            device = driver.Device(0)
            major, minor = device.compute_capability()
            self._context = device.retain_primary_context()
            with _current(self._context):
                self._stream = driver.Stream()
        except driver.Error as error:
            raise EngineFailed(f"CUDA cannot be started: {error}; check that the GPU and its driver work") from error
        self.compute_capability = f"{major}.{minor}"
        self.stream = int(self._stream.handle)
        self._memory: list[Any] = []

    def allocate(self, size_bytes: int) -> int:
        memory = self._call(self._driver.mem_alloc, size_bytes)
        self._memory.append(memory)
        return int(memory)

    def copy_in(self, address: int, array: NDArray[Any]) -> None:
        self._call(self._driver.memcpy_htod_async, address, array, self._stream)

    def copy_out(self, array: NDArray[Any], address: int) -> None:
        self._call(self._driver.memcpy_dtoh_async, array, address, self._stream)

    def synchronize(self) -> None:
        self._call(self._stream.synchronize)

    def close(self) -> None:
        for memory in self._memory:
            self._call(memory.free)
        self._memory.clear()

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            with _current(self._context):
                return function(*args)
        except self._driver.Error as error:
            raise EngineFailed(f"CUDA failed: {error}; check that the GPU and its driver work") from error


@contextmanager
def _current(context: Any) -> Iterator[None]:
    """Make a pycuda context current in the calling thread during the block."""
    context.push()
    try:
        yield
    finally:
        context.pop()


def _cuda_runtime() -> Any:
    from cuda.bindings import runtime

    return runtime
