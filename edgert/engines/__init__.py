"""The engine seam: `Engine.load(artifact) -> Session`, one file a vendor, SDKs imported lazily.

Adding an engine is one file here, one line in `ENGINES` and one row in `tests/device/engines/test_engines.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from edgert.errors import ConfigInvalid
from edgert.tensors import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

# name -> "module:Class"; the module imports its vendor's SDK only when an artifact is prepared or loaded.
ENGINES = {
    "null": "edgert.engines.null:NullEngine",
    "fault": "edgert.engines.fault:FaultEngine",
    "tflite": "edgert.engines.tflite:TFLiteEngine",
    "openvino": "edgert.engines.openvino:OpenVINOEngine",
    "onnxruntime": "edgert.engines.onnxruntime:ONNXRuntimeEngine",
    "tensorrt": "edgert.engines.tensorrt:TensorRTEngine",
}
UNTHREADED = ("null", "fault", "tensorrt")  # these engines ignore `threads`


@dataclass(frozen=True)
class LocalArtifact:
    """An artifact's files as they lie on this machine, verified already.

    `path` is the file the engine opens (its companions lie beside it). `inputs` and `outputs` are
    the model's contract, the same for every engine: the session takes and gives arrays in that order.
    """

    engine: str
    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sha256: str


@dataclass(frozen=True)
class EngineOptions:
    """How an engine should run here. `threads` 0 lets the engine choose.

    `cache_dir` is where an engine may keep what it compiled; None keeps nothing. `extra` are the engine's own
    settings, by its own names: the packager runs an artifact in several ways with them, to see how far answers differ.
    `progress` hears of what takes minutes in a load, so that who waits for it knows that it is not stuck.
    """

    threads: int = 1
    cache_dir: Path | None = None
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    extra: dict[str, Any] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda line: None


class Session(Protocol):
    """A loaded artifact. One thread at a time calls `run`; the GIL is free while the engine works."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Answer one batch.

        `tensors` are C-contiguous, in the order, dtype and item shape of `inputs`, all with the same
        length on axis 0 where that is -1. The arrays that come back are the caller's to keep: a later
        run does not change them. Raises EngineFailed.
        """
        ...

    def close(self) -> None:
        """Give everything back; the session is not used again."""
        ...


class Engine(Protocol):
    """One vendor's runtime."""

    name: str

    def version(self) -> str:
        """The SDK's version. Raises EngineMissing, naming what to install."""
        ...

    def prepare(self, artifact: LocalArtifact, options: EngineOptions, progress: Callable[[str], None]) -> None:
        """Do what may take minutes (TensorRT builds its plan), once, before the artifact goes live."""
        ...

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> Session:
        """Open the artifact. Raises EngineMissing or EngineFailed."""
        ...


def engine_by_name(name: str) -> Engine:
    """The engine called `name`, its SDK not imported yet. Raises ConfigInvalid for a name not known."""
    if name not in ENGINES:
        raise ConfigInvalid(f"no engine is called {name!r}; known: {', '.join(ENGINES)}")
    module, _, cls = ENGINES[name].partition(":")
    return cast(Engine, getattr(importlib.import_module(module), cls)())


def bucket_for(count: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending `buckets` that holds `count` items, or `count` where none does."""
    return next((b for b in buckets if b >= count), count)
