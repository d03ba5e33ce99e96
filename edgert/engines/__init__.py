"""The interface of engines: `Engine.load(artifact) -> Session`. Each vendor has one file.

An engine's file imports its SDK when the SDK is first needed. To add an engine, add one file here and one entry in
`ENGINES`; `tests/device/engines/test_engines.py` then tests the engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from edgert.bundle.buckets import Buckets
from edgert.errors import ConfigInvalid, EngineFailed, EngineMissing
from edgert.tensors import TensorSpec
from edgert.vendor_telemetry import stop_reporting

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class EngineKind:
    """The traits of one engine, known before its module is imported.

    `implementation` is "module:Class". The import of this module does not import the vendor's SDK: the methods of the
    engine import the SDK when they need it.
    """

    implementation: str
    packages: tuple[str, ...] = ()  # packages that contain the SDK: one is enough; engines for tests need none
    threaded: bool = True  # the engine uses `EngineOptions.threads`
    prepares: bool = False  # `Engine.prepare` does something
    concurrent: bool = False  # several threads may run one session at once
    # The fork server can import the SDK, because the import starts no thread and opens no device.
    forkable: bool = False
    device_files: bool = False  # the engine accesses its processor through device files
    system_package: str = ""  # the system's package with the SDK, if pip cannot install the SDK


ENGINES = {
    "null": EngineKind("edgert.engines.null:NullEngine", threaded=False),
    "fault": EngineKind("edgert.engines.fault:FaultEngine", threaded=False),
    "tflite": EngineKind("edgert.engines.tflite:TFLiteEngine", ("ai_edge_litert", "tflite_runtime"), forkable=True),
    "openvino": EngineKind("edgert.engines.openvino:OpenVINOEngine", ("openvino",)),
    "onnxruntime": EngineKind(
        "edgert.engines.onnxruntime:ONNXRuntimeEngine", ("onnxruntime",), concurrent=True, forkable=True
    ),
    "tensorrt": EngineKind(
        "edgert.engines.tensorrt:TensorRTEngine",
        ("tensorrt",),
        threaded=False,
        prepares=True,
        device_files=True,
        system_package="tensorrt",
    ),
}
# `edgertd status` shows an engine for tests only if a model runs on it.
FOR_TESTS = tuple(name for name, kind in ENGINES.items() if not kind.packages)


@dataclass(frozen=True)
class LocalArtifact:
    """An artifact's files on this machine, already verified.

    Attributes:
        path: The file that the engine opens; the artifact's other files are in the same folder.
        inputs: The model's inputs, the same for every engine. A session accepts arrays in this order.
        outputs: The model's outputs, the same for every engine. A session returns arrays in this order.
        buckets: The sizes of an open axis. An engine's session accepts only these sizes; `padding.load_session` opens a
            session for all lengths.
    """

    engine: str
    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sha256: str
    buckets: Buckets | None = None


@dataclass(frozen=True)
class EngineOptions:
    """The settings of an engine on this machine.

    Attributes:
        threads: The number of threads; with 0, the engine chooses the number.
        cache_dir: The folder for compiled files; with None, the engine stores none. The name of each file or folder in
            it starts with the artifact's SHA-256, so that an install can remove it once no version has the artifact.
        buckets: The batch sizes that the engine compiles for.
        extra: Settings by the engine's own names. With these, the packager runs an artifact in several ways, to measure
            how much the artifact's answers differ.
        progress: The receiver of progress lines while a load takes minutes.
    """

    threads: int = 1
    cache_dir: Path | None = None
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    extra: dict[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda line: None


class Session(Protocol):
    """A loaded artifact. Most sessions inherit `release_memory`, because they have no memory to release.

    One thread at a time calls `run`, unless the engine is `concurrent`. `run` releases the GIL while it works.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs for one batch.

        `tensors` are C-contiguous, in the order, dtype and item shape of `inputs`. If axis 0 is -1, all tensors have
        the same length along it. A later run does not change the returned arrays. Raises EngineFailed.
        """
        ...

    def release_memory(self, sample: Sequence[NDArray[Any]]) -> None:
        """Release the memory of larger runs. The engine may run `sample`, one item. Raises EngineFailed."""
        return

    def close(self) -> None:
        """Release all resources. The session cannot be used afterwards."""
        ...


class Engine(Protocol):
    """One vendor's runtime. Most engines inherit `prepare` and `before_fork`, which do nothing."""

    name: str

    def version(self) -> str:
        """Return the SDK's version. Raises EngineMissing, which names what to install."""
        ...

    def prepare(self, artifact: LocalArtifact, options: EngineOptions, progress: Callable[[str], None]) -> None:
        """Do work that takes minutes, once, before the artifact is live: TensorRT builds its plan."""
        return

    def before_fork(self) -> None:
        """Set up the data that all sessions of a process share, so that forks copy less memory.

        No thread may remain after this call.
        """
        return

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> Session:
        """Open the artifact. Raises EngineMissing or EngineFailed."""
        ...


def engine_by_name(name: str) -> Engine:
    """Return the engine `name`, without an import of its SDK. Raises ConfigInvalid for an unknown name."""
    if name not in ENGINES:
        raise ConfigInvalid(
            f"unknown engine {name!r}; known: {', '.join(name for name in ENGINES if name not in FOR_TESTS)}"
        )
    module, _, cls = ENGINES[name].implementation.partition(":")
    return cast(Engine, getattr(importlib.import_module(module), cls)())


def threads_to_try(engine: str, cpus: int) -> tuple[int, ...]:
    """Return the numbers of threads to measure: 1, 2, 4 ... and `cpus`."""
    if not ENGINES[engine].threaded:
        return (1,)
    return (*(1 << i for i in range(cpus.bit_length()) if 1 << i < cpus), cpus)


def prepare(artifact: LocalArtifact, options: EngineOptions, progress: Callable[[str], None]) -> None:
    """Call `Engine.prepare`. If the engine has nothing to prepare, import neither the engine nor NumPy."""
    kind = ENGINES.get(artifact.engine)
    if kind is None or kind.prepares:
        engine_by_name(artifact.engine).prepare(artifact, options, progress)


def system_package(engine: str) -> str:
    """Return the system's package with an engine's SDK; "" if there is none or the engine is unknown."""
    return ENGINES[engine].system_package if engine in ENGINES else ""


def sdk_of(engine: str) -> Any:
    """Import the SDK of `engine`, with its telemetry off. Raises EngineMissing with the way to install it."""
    stop_reporting()
    try:
        return importlib.import_module(engine)
    except ImportError as error:
        raise EngineMissing(
            f"engine {engine} is not installed here ({error}); install it with: pip install 'edgert[{engine}]'"
        ) from error


def closed(*_: Any) -> Any:
    """Raise EngineFailed. A closed session calls this function instead of its run."""
    raise EngineFailed("the session is closed")


def bucket_for(count: int, buckets: Sequence[int]) -> int:
    """Return the smallest of the ascending `buckets` for `count` items, or `count` if all are smaller."""
    return next((b for b in buckets if b >= count), count)
