"""The TensorRT engine against simulators of TensorRT and of the CUDA runtime.

These tests show that a plan is built once and kept for one GPU and version. They also show that batches reach the GPU's
memory and come back. They prove nothing about TensorRT itself, which needs a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgert.bundle.buckets import Buckets, CutOutput, PaddedInput
from edgert.engines import EngineOptions, LocalArtifact, engine_by_name
from edgert.engines.padding import load_session
from edgert.errors import EngineFailed
from edgert.tensors import TensorSpec
from tests.support import models

X, Y = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 4))


class CudaSimulator(ModuleType):
    """`cuda.bindings.runtime` with GPU memory in this process; `fails` names a failing function."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=8, cudaDevAttrComputeCapabilityMinor=7)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.memory: dict[int, Any] = {}
        self.fails = ""

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:
        return (35 if self.fails == "cudaDeviceGetAttribute" else 0), attribute

    def cudaStreamCreate(self) -> tuple[int, int]:
        return 0, 7

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> tuple[int]:
        assert stream == 7
        ctypes.memmove(to, source, size)
        return (0,)


class TensorRTSimulator(ModuleType):
    """The part of `tensorrt` that the engine uses. The simulated model doubles each value."""

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.__version__ = "10.3.0"
        self.builds = 0
        self.timings: list[bytes] = []
        self.runs: list[int] = []
        self.ILogger = type("ILogger", (), {"Severity": SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)})
        self.IProgressMonitor = type("IProgressMonitor", (), {})
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        self.Builder = lambda log: BuilderSimulator(self, log)
        self.OnnxParser = lambda network, log: ParserSimulator(log)
        self.Runtime = lambda log: self
        self.nptype = lambda dtype: dtype

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        return self if plan.startswith(b"plan of ") else None

    def get_tensor_dtype(self, name: str) -> Any:
        return np.float32

    def create_execution_context(self) -> ContextSimulator:
        return ContextSimulator(self)


class ParserSimulator:
    def __init__(self, log: Any) -> None:
        self.num_errors, self.log = 1, log

    def parse(self, model: bytes) -> bool:
        self.log.log(1, "the log's reason")
        return model != b"garbage"

    def get_error(self, i: int) -> str:
        return "no ONNX"


class BuilderSimulator:
    def __init__(self, tensorrt: TensorRTSimulator, log: Any) -> None:
        self.tensorrt = tensorrt

    def create_network(self, flags: int) -> Any:
        assert flags == 1 << 1
        return SimpleNamespace()

    def create_builder_config(self) -> Any:
        cache = SimpleNamespace(serialize=lambda: b"timings")

        def timing_cache(data: bytes) -> Any:
            self.tensorrt.timings.append(data)
            return cache

        return SimpleNamespace(
            add_optimization_profile=lambda profile: None,
            create_timing_cache=timing_cache,
            set_timing_cache=lambda cache, ignore: None,
            get_timing_cache=lambda: cache,
        )

    def create_optimization_profile(self) -> Any:
        return SimpleNamespace(set_shape=lambda name, least, usual, most: None)

    def build_serialized_network(self, network: Any, config: Any) -> bytes:
        self.tensorrt.builds += 1
        config.progress_monitor.phase_start("Building", None, 1)
        assert config.progress_monitor.step_complete("Building", 0)
        config.progress_monitor.phase_finish("Building")
        return b"plan of " + self.tensorrt.__version__.encode()


class ContextSimulator:
    def __init__(self, tensorrt: TensorRTSimulator) -> None:
        self.tensorrt = tensorrt
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return shape[0] <= 8

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        count = int(np.prod(self.shape))
        x, y = (
            np.ctypeslib.as_array(ctypes.cast(self.addresses[name], ctypes.POINTER(ctypes.c_float)), (count,))
            for name in ("x", "y")
        )
        y[:] = 2 * x
        self.tensorrt.runs.append(self.shape[0])
        return True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaSimulator:
    import sys

    simulator, bindings = CudaSimulator(), ModuleType("cuda.bindings")
    bindings.runtime = simulator  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    return simulator


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch, cuda: CudaSimulator) -> Iterator[TensorRTSimulator]:
    import sys

    simulator = TensorRTSimulator()
    monkeypatch.setitem(sys.modules, "tensorrt", simulator)
    yield simulator
    assert not cuda.memory  # after every test, the GPU's memory is free


@pytest.fixture
def artifact(tmp_path: Path) -> LocalArtifact:
    (tmp_path / "model.onnx").write_bytes(b"model")
    return LocalArtifact("tensorrt", tmp_path / "model.onnx", (X,), (Y,), "a" * 64)


def test_prepare_builds_the_plan_once_and_load_uses_this_plan(
    tensorrt: TensorRTSimulator, artifact: LocalArtifact, tmp_path: Path
) -> None:
    engine, options, lines = engine_by_name("tensorrt"), EngineOptions(cache_dir=tmp_path / "cache"), list[str]()
    engine.prepare(artifact, options, lines.append)
    assert any("Building" in line for line in lines)
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert names == [f"{'a' * 64}-trt10.3.0-sm8.7-b32.plan", "timing-trt10.3.0-sm8.7.cache"]
    engine.prepare(artifact, options, lines.append)
    engine.load(artifact, options).close()
    assert tensorrt.builds == 1


def test_after_an_upgrade_of_tensorrt_the_load_builds_the_plan_anew_and_reports_this(
    tensorrt: TensorRTSimulator, artifact: LocalArtifact, tmp_path: Path
) -> None:
    engine, lines = engine_by_name("tensorrt"), list[str]()
    options = EngineOptions(cache_dir=tmp_path / "cache", progress=lines.append)
    engine.prepare(artifact, options, lambda line: None)
    engine.load(artifact, options).close()
    assert (tensorrt.builds, lines) == (1, [])
    tensorrt.__version__ = "11.0.0"
    engine.load(artifact, options).close()
    assert tensorrt.builds == 2
    assert "building the plan" in lines[0]
    plans = [path.name for path in (tmp_path / "cache").glob("*.plan")]
    assert plans == [f"{'a' * 64}-trt11.0.0-sm8.7-b32.plan"]  # nothing would load the earlier plan


def test_the_next_build_starts_from_the_timings_that_were_kept(
    tensorrt: TensorRTSimulator, artifact: LocalArtifact, tmp_path: Path
) -> None:
    engine, options = engine_by_name("tensorrt"), EngineOptions(cache_dir=tmp_path / "cache")
    engine.prepare(artifact, options, lambda line: None)
    other = LocalArtifact("tensorrt", artifact.path, (X,), (Y,), "b" * 64)
    engine.prepare(other, options, lambda line: None)
    assert tensorrt.timings == [b"", b"timings"]
    assert len(list((tmp_path / "cache").glob("*.plan"))) == 2


def test_the_gpu_computes_each_batch_and_splits_a_large_batch(
    tensorrt: TensorRTSimulator, artifact: LocalArtifact
) -> None:
    session = engine_by_name("tensorrt").load(artifact, EngineOptions(buckets=(1, 8)))
    for count in (1, 3, 8, 20, 1):
        given = models.random(count, 4, seed=count)
        answer = session.run([given])[0]
        np.testing.assert_array_equal(answer, 2 * given)
    assert tensorrt.runs == [1, 3, 8, 8, 8, 4, 1]
    session.close()
    session.close()
    with pytest.raises(EngineFailed, match="closed"):
        session.run([models.random(1, 4)])


def test_a_refusal_by_tensorrt_raises_engine_failed_with_its_reason(
    tensorrt: TensorRTSimulator, artifact: LocalArtifact, tmp_path: Path
) -> None:
    engine, options = engine_by_name("tensorrt"), EngineOptions(cache_dir=tmp_path / "cache")
    artifact.path.write_bytes(b"garbage")
    with pytest.raises(EngineFailed, match="no ONNX"):
        engine.load(artifact, options)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_plan_is_built_again(tensorrt: TensorRTSimulator, artifact: LocalArtifact, tmp_path: Path) -> None:
    engine, options = engine_by_name("tensorrt"), EngineOptions(cache_dir=tmp_path)
    engine.prepare(artifact, options, lambda line: None)
    next(tmp_path.glob("*.plan")).write_bytes(b"half a plan")
    engine.load(artifact, options).close()
    assert tensorrt.builds == 2


def test_a_machine_without_a_gpu_raises_engine_failed(
    tensorrt: TensorRTSimulator, cuda: CudaSimulator, artifact: LocalArtifact
) -> None:
    cuda.fails = "cudaDeviceGetAttribute"
    with pytest.raises(EngineFailed, match="check that the GPU"):
        engine_by_name("tensorrt").load(artifact, EngineOptions())


def test_one_plan_runs_all_lengths_of_the_buckets(
    tensorrt: TensorRTSimulator, artifact: LocalArtifact, tmp_path: Path
) -> None:
    open_x, open_y = (TensorSpec(name, "FP32", (-1, -1)) for name in ("x", "y"))
    buckets = Buckets("t", (4, 8), (PaddedInput("x", 1),), (CutOutput("y", 1),))
    wide = replace(artifact, inputs=(open_x,), outputs=(open_y,), buckets=buckets)
    session = load_session(wide, EngineOptions(buckets=(1, 4), cache_dir=tmp_path / "cache"))
    for count, length in ((1, 3), (2, 8), (4, 5), (6, 4), (1, 1)):
        given = models.random(count, length, seed=length)
        np.testing.assert_array_equal(session.run([given])[0], 2 * given)
    session.close()
    assert tensorrt.builds == 1
    assert [path.name for path in (tmp_path / "cache").glob("*.plan")] == [f"{'a' * 64}-trt10.3.0-sm8.7-b4-l4to8.plan"]
