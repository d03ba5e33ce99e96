"""TensorRT: the engine for NVIDIA Jetson. It uses only the API that 10.3 (JetPack 6) and 11 share.

The artifact is a Q/DQ ONNX graph. During the deployment, `prepare` builds a plan from the graph on the device. This
takes minutes, while the previous version serves. A plan fits one GPU and one version of TensorRT, so its name in
`cache_dir` contains both. If the device's TensorRT changes, the next load builds a new plan. Stored timings of kernels
make this build faster.

Parsing and building are tested without a GPU through TensorRT-RTX, which has the same API. Loading and running have not
run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.durable import replace_file, storing
from edgert.engines import Engine, EngineOptions, LocalArtifact, Session
from edgert.engines.cuda import Cuda, open_cuda
from edgert.engines.padding import in_pieces
from edgert.errors import EngineFailed, EngineMissing
from edgert.printable import file_error
from edgert.tensors import TensorSpec, batchable

Progress = Callable[[str], None]


class TensorRTEngine(Engine):
    name = "tensorrt"

    def version(self) -> str:
        return str(_sdk().__version__)

    def prepare(self, artifact: LocalArtifact, options: EngineOptions, progress: Progress) -> None:
        """Build the plan for this GPU into `options.cache_dir`, if it is missing."""
        tensorrt, cuda = _sdk(), open_cuda()
        try:
            plan_file = _plan_file(tensorrt, cuda, artifact, options)
            if plan_file is not None and not plan_file.is_file():
                _plan(tensorrt, cuda, artifact, options, progress)
        finally:
            cuda.close()

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> TensorRTSession:
        tensorrt, cuda = _sdk(), open_cuda()
        try:
            log = _log(tensorrt)
            runtime = tensorrt.Runtime(log)
            engine = _engine(tensorrt, runtime, cuda, artifact, options)
            if engine is None:
                raise EngineFailed(f"TensorRT cannot load its plan of {artifact.path.name}: {log.reason()}")
            return TensorRTSession(tensorrt, cuda, (log, runtime, engine), artifact, max(options.buckets))
        except BaseException:
            cuda.close()
            raise


def plan_name(sha256: str, version: str, compute_capability: str, batch_max: int, sizes: Sequence[int] = ()) -> str:
    """Return the file name of the plan for this artifact, TensorRT, GPU, largest batch and bucket range."""
    lengths = f"-l{sizes[0]}to{sizes[-1]}" if sizes else ""
    return f"{sha256}-trt{version}-sm{compute_capability}-b{batch_max}{lengths}.plan"


class TensorRTSession(Session):
    """A session with GPU memory for the largest batch; a smaller batch uses the start of this memory."""

    def __init__(
        self, tensorrt: Any, cuda: Cuda, loaded: tuple[Any, Any, Any], artifact: LocalArtifact, batch_max: int
    ) -> None:
        self.inputs, self.outputs = artifact.inputs, artifact.outputs
        self._cuda = cuda
        self._batches = batchable((*self.inputs, *self.outputs))
        self._batch_max = batch_max if self._batches else 1
        self._buckets = artifact.buckets
        # TensorRT's objects do not keep the objects that created them alive, so the session keeps all three.
        self._loaded: tuple[Any, ...] = loaded
        log, _, engine = loaded
        self._context = engine.create_execution_context()
        if self._context is None:
            raise EngineFailed(f"TensorRT cannot create a context for {artifact.path.name}: {log.reason()}")
        for spec in (*self.inputs, *self.outputs):
            dtype = np.dtype(tensorrt.nptype(engine.get_tensor_dtype(spec.name)))
            if dtype != spec.dtype:
                raise EngineFailed(f"TensorRT has {spec.name!r} as {dtype}, but the model's contract has {spec.dtype}")
        self._addresses = {spec.name: self._allocate(spec) for spec in (*self.inputs, *self.outputs)}
        self._shaped_for = (0, 0)

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        if self._context is None:
            raise EngineFailed("the session is closed")
        count = len(tensors[0]) if self._batches else 1
        if count > self._batch_max:
            return in_pieces(self, tensors, self._batch_max)
        length = self._shape(count, tensors)
        for spec, array in zip(self.inputs, tensors, strict=True):
            self._cuda.copy_in(self._addresses[spec.name], array)
        if not self._context.execute_async_v3(self._cuda.stream):
            raise EngineFailed("TensorRT could not run this batch")
        answers = [np.empty(_shape(spec, count, self._buckets, length), spec.dtype) for spec in self.outputs]
        for spec, answer in zip(self.outputs, answers, strict=True):
            self._cuda.copy_out(answer, self._addresses[spec.name])
        self._cuda.synchronize()
        return answers

    def close(self) -> None:
        if self._context is not None:
            self._context = None
            self._loaded = ()
            self._cuda.close()

    def _shape(self, count: int, tensors: Sequence[NDArray[Any]]) -> int:
        """Set the context's shapes, if they differ from the last shapes; return the bucket's length, or 0."""
        length = 0
        if self._buckets is not None:
            first = self._buckets.inputs[0]
            length = next(
                a.shape[first.axis] for s, a in zip(self.inputs, tensors, strict=True) if s.name == first.name
            )
        if (count, length) == self._shaped_for:
            return length
        for spec in self.inputs:
            shape = _shape(spec, count, self._buckets, length)
            if not self._context.set_input_shape(spec.name, shape):
                raise EngineFailed(f"TensorRT refuses the shape {list(shape)} for input {spec.name!r}")
        self._shaped_for = (count, length)
        return length

    def _allocate(self, spec: TensorSpec) -> int:
        largest = 0 if self._buckets is None else self._buckets.largest
        elements = int(np.prod(_shape(spec, self._batch_max, self._buckets, largest)))
        address = self._cuda.allocate(max(1, elements * spec.dtype.itemsize))
        self._context.set_tensor_address(spec.name, address)
        return address


def build_plan(
    tensorrt: Any,
    model: bytes,
    inputs: tuple[TensorSpec, ...],
    batch_max: int,
    progress: Progress,
    configure: Callable[[Any], None] = lambda config: None,
    buckets: Buckets | None = None,
) -> bytes:
    """Parse an ONNX model and build its plan. Raises EngineFailed with TensorRT's reason.

    Args:
        configure: Changes the builder's configuration before the build.
        buckets: The sizes of an open axis; one plan with one copy of the weights serves all of them.
    """
    log = _log(tensorrt)
    builder = tensorrt.Builder(log)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, log)
    if not parser.parse(model):
        reasons = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise EngineFailed(f"TensorRT {tensorrt.__version__} cannot read the model: {reasons or log.reason()}")
    config = builder.create_builder_config()
    if any(-1 in spec.shape for spec in inputs):
        config.add_optimization_profile(_profile(builder, inputs, batch_max, buckets))
    config.progress_monitor = monitor = _monitor(tensorrt, progress)
    configure(config)
    plan = builder.build_serialized_network(network, config)
    del monitor  # the configuration does not keep the monitor alive, so this reference must exist until here
    if plan is None:
        raise EngineFailed(f"TensorRT {tensorrt.__version__} cannot build the model: {log.reason()}")
    return bytes(plan)


def _profile(builder: Any, inputs: tuple[TensorSpec, ...], batch_max: int, buckets: Buckets | None) -> Any:
    profile = builder.create_optimization_profile()
    least, most = (0, 0) if buckets is None else (buckets.sizes[0], buckets.largest)
    for spec in inputs:
        # The plan is tuned for single requests, which are usual at the edge; larger batches also run.
        sizes = ((1, least), (1, most), (batch_max, most))
        profile.set_shape(spec.name, *(_shape(spec, count, buckets, length) for count, length in sizes))
    return profile


def _plan(tensorrt: Any, cuda: Cuda, artifact: LocalArtifact, options: EngineOptions, progress: Progress) -> bytes:
    """Return the plan from `cache_dir`; if it is missing, build it and store it there."""
    version, capability = str(tensorrt.__version__), cuda.compute_capability
    batch_max, plan_file = max(options.buckets), _plan_file(tensorrt, cuda, artifact, options)
    try:
        if plan_file is not None and plan_file.is_file():
            return plan_file.read_bytes()
        model = artifact.path.read_bytes()
    except OSError as error:
        raise EngineFailed(f"cannot read {file_error(error)}") from error
    progress(f"TensorRT {version}: building the plan for compute capability {capability}; this takes minutes")
    if plan_file is None:
        return build_plan(tensorrt, model, artifact.inputs, batch_max, progress, buckets=artifact.buckets)
    timings = _Timings(plan_file.parent / f"timing-trt{version}-sm{capability}.cache")
    plan = build_plan(tensorrt, model, artifact.inputs, batch_max, progress, timings.attach, artifact.buckets)
    timings.keep()
    _write(plan_file, plan)
    for path in plan_file.parent.glob(f"{artifact.sha256}-trt*.plan"):
        if path.name != plan_file.name:  # a plan for another TensorRT or GPU, which is no longer loaded
            path.unlink(missing_ok=True)
    progress(f"TensorRT {version}: the plan is built ({len(plan)} bytes)")
    return plan


def _engine(tensorrt: Any, runtime: Any, cuda: Cuda, artifact: LocalArtifact, options: EngineOptions) -> Any:
    """Return the plan's engine; None if TensorRT cannot load the plan, which is then built again, once."""
    engine = runtime.deserialize_cuda_engine(_plan(tensorrt, cuda, artifact, options, options.progress))
    plan_file = _plan_file(tensorrt, cuda, artifact, options)
    if engine is None and plan_file is not None:  # a damaged file, or a new driver with the same version
        plan_file.unlink(missing_ok=True)
        engine = runtime.deserialize_cuda_engine(_plan(tensorrt, cuda, artifact, options, options.progress))
    return engine


def _plan_file(tensorrt: Any, cuda: Cuda, artifact: LocalArtifact, options: EngineOptions) -> Path | None:
    if options.cache_dir is None:
        return None
    sizes = () if artifact.buckets is None else artifact.buckets.sizes
    name = plan_name(artifact.sha256, str(tensorrt.__version__), cuda.compute_capability, max(options.buckets), sizes)
    return options.cache_dir / name


class _Timings:
    """TensorRT's measured times of its kernels on this GPU, which make the next build much faster."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = None

    def attach(self, config: Any) -> None:
        data = self._path.read_bytes() if self._path.is_file() else b""
        config.set_timing_cache(config.create_timing_cache(data), False)
        self._config = config

    def keep(self) -> None:
        if self._config is not None:
            _write(self._path, bytes(self._config.get_timing_cache().serialize()))


def _write(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, so that a power cut leaves no incomplete plan."""
    with storing(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, shared=True)


def _shape(spec: TensorSpec, count: int, buckets: Buckets | None, length: int) -> tuple[int, ...]:
    spec = spec if buckets is None else buckets.spec_at(spec, length)
    return tuple(count if n == -1 else n for n in spec.shape)


def _log(tensorrt: Any) -> Any:
    """Return a TensorRT logger that keeps the last errors for the message of an exception."""

    class Log(tensorrt.ILogger):  # type: ignore[misc]  # TensorRT is imported lazily, so its classes are Any
        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (tensorrt.ILogger.Severity.ERROR, tensorrt.ILogger.Severity.INTERNAL_ERROR):
                self.errors = [*self.errors[-2:], message]

        def reason(self) -> str:
            return "; ".join(self.errors) or "it gave no reason"

    return Log()


def _monitor(tensorrt: Any, progress: Progress) -> Any:
    """Return a monitor that reports the progress of each outer phase of a build, in tenths."""

    class Monitor(tensorrt.IProgressMonitor):  # type: ignore[misc]  # this class is also Any
        def __init__(self) -> None:
            tensorrt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            steps = self.steps.get(phase_name, 0)
            if steps and step % max(1, steps // 10) == 0:
                progress(f"TensorRT: {phase_name}, step {step} of {steps}")
            return True  # False cancels the build

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self.steps:
                progress(f"TensorRT: {phase_name} done")

    return Monitor()


def _sdk() -> Any:
    try:
        import tensorrt
    except ImportError as error:
        raise EngineMissing(
            f"engine tensorrt is not installed here ({error}); on a Jetson it comes with JetPack (apt install "
            "python3-libnvinfer, and a virtual environment with --system-site-packages), and its CUDA binding with: "
            "pip install 'edgert[tensorrt]'"
        ) from error
    return tensorrt
