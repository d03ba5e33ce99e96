"""The CUDA interface: the choice of a binding, and both bindings against simulators of their libraries."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgert.engines.cuda import PycudaCuda, open_cuda
from edgert.errors import EngineFailed, EngineMissing


class DriverError(Exception):
    pass


class DriverSimulator(ModuleType):
    """`pycuda.driver`: memory of this process, and a context that every call needs as the current one."""

    Error = DriverError

    def __init__(self) -> None:
        super().__init__("pycuda.driver")
        self.current = 0
        self.memory: dict[int, bytearray] = {}
        self.fails = False

    def init(self) -> None:
        if self.fails:
            raise DriverError("no CUDA-capable device")

    def Device(self, number: int) -> Any:
        context = SimpleNamespace(push=lambda: self._move(1), pop=lambda: self._move(-1))
        return SimpleNamespace(compute_capability=lambda: (8, 7), retain_primary_context=lambda: context)

    def Stream(self) -> Any:
        return SimpleNamespace(handle=77, synchronize=self._checked)

    def mem_alloc(self, size: int) -> Any:
        self._checked()
        address = 1000 + len(self.memory)
        self.memory[address] = bytearray(size)

        class Memory(int):
            def free(memory) -> None:  # `self` is the simulator
                del self.memory[int(memory)]

        return Memory(address)

    def memcpy_htod_async(self, address: int, array: Any, stream: Any) -> None:
        self._checked()
        self.memory[address][: array.nbytes] = array.tobytes()

    def memcpy_dtoh_async(self, array: Any, address: int, stream: Any) -> None:
        self._checked()
        array[...] = np.frombuffer(self.memory[address], array.dtype, array.size).reshape(array.shape)

    def _move(self, by: int) -> None:
        self.current += by

    def _checked(self) -> None:
        assert self.current == 1, "the context is the thread's during a call"
        if self.fails:
            raise DriverError("an illegal address")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> DriverSimulator:
    simulator, package = DriverSimulator(), ModuleType("pycuda")
    package.driver = simulator  # type: ignore[attr-defined]
    for name, module in (("cuda", None), ("pycuda", package), ("pycuda.driver", simulator)):
        monkeypatch.setitem(sys.modules, name, module)
    return simulator


def test_without_a_binding_the_error_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "pycuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EngineMissing, match=r"edgert\[tensorrt\].*edgert\[pycuda\]"):
        open_cuda()


def test_pycuda_is_used_if_cuda_bindings_is_missing(driver: DriverSimulator) -> None:
    cuda = open_cuda()
    assert isinstance(cuda, PycudaCuda)
    assert (cuda.compute_capability, cuda.stream) == ("8.7", 77)
    given, back = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((2, 3), np.float32)
    address = cuda.allocate(given.nbytes)
    cuda.copy_in(address, given)
    cuda.copy_out(back, address)
    cuda.synchronize()
    assert np.array_equal(back, given)
    cuda.close()
    assert (driver.memory, driver.current) == ({}, 0)


def test_a_failing_driver_raises_engine_failed(driver: DriverSimulator) -> None:
    cuda = open_cuda()
    driver.fails = True
    with pytest.raises(EngineFailed, match="an illegal address"):
        cuda.allocate(8)
    with pytest.raises(EngineFailed, match="check that the GPU"):
        open_cuda()
