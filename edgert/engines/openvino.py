"""OpenVINO: the engine for Intel boxes.

A compiled model with fixed shapes is up to 2.3x faster than a model whose batch changes. So each bucket of the batch,
and of another open axis, has its own compiled model and infer request. A bucket's model is compiled when the bucket is
first needed. The tensors are preset arrays of this session: a call copies in, infers, and copies out. This takes 26 µs
on the digits model; `infer` with its own copies takes 28 µs, and `start_async` with `wait` takes 126 µs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.durable import make_private
from edgert.engines import Engine, EngineOptions, LocalArtifact, Session, bucket_for, sdk_of
from edgert.engines.padding import in_pieces
from edgert.errors import EngineFailed
from edgert.machine import int8_saturates
from edgert.tensors import TensorSpec, batchable

_DEVICE = "CPU"
# The last instruction set before AMX. With AMX, OpenVINO 2026.4 answered INT8 attention with NaN or noise.
_ISA_MAX = "AVX512_CORE_FP16"
# "YES": compute INT8 layers with INT8 instructions; "NO": in FP32, with INT8's rounding.
LOW_PRECISION = "LP_TRANSFORMS_MODE"
_Shapes = tuple[tuple[int, ...], ...]  # the shape of one item of each input


class OpenVINOEngine(Engine):
    name = "openvino"

    def version(self) -> str:
        return str(sdk().__version__).split("-")[0]

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> OpenVINOSession:
        openvino = sdk()
        try:
            core = openvino.Core()
            if options.cache_dir is not None:
                with contextlib.suppress(OSError):  # on read-only storage, each load compiles the model
                    make_private(folder := options.cache_dir / artifact.sha256)
                    core.set_property({"CACHE_DIR": str(folder)})
            model = core.read_model(artifact.path)
            return OpenVINOSession(openvino, core, model, artifact, options)
        except EngineFailed:
            raise
        except Exception as error:  # the SDK's exceptions share no base class
            raise EngineFailed(
                f"openvino cannot load {artifact.path.name}: {_reason(error)}; "
                "build the model again, or use a newer openvino"
            ) from error


class OpenVINOSession(Session):
    def __init__(self, openvino: Any, core: Any, model: Any, artifact: LocalArtifact, options: EngineOptions) -> None:
        self.inputs, self.outputs = artifact.inputs, artifact.outputs
        self._openvino = openvino
        self._core = core
        self._model = model
        self._config = _config(options)
        self._batches = batchable((*self.inputs, *self.outputs))
        # A model with a fixed batch has one bucket, and its batch is never changed.
        self._buckets = tuple(sorted(options.buckets)) if self._batches else (1,)
        self._fixed = None if artifact.buckets is not None else tuple(spec.item_shape for spec in self.inputs)
        self._by_size: dict[tuple[int, _Shapes], _Bucket] = {}
        if self._fixed is not None:
            self._bucket(self._buckets[0], self._fixed)

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        count = len(tensors[0]) if self._batches else 1
        if count > self._buckets[-1]:
            return in_pieces(self, tensors, self._buckets[-1])
        shapes = self._fixed or tuple(array.shape[1:] for array in tensors)
        try:
            return self._bucket(bucket_for(count, self._buckets), shapes).run(tensors, count)
        except EngineFailed:
            raise
        except Exception as error:  # the SDK's exceptions share no base class
            raise EngineFailed(f"openvino cannot run this batch: {_reason(error)}") from error

    def close(self) -> None:
        self._by_size = {}
        self._model = None
        self._core = None

    def _bucket(self, size: int, shapes: _Shapes) -> _Bucket:
        key = (size, shapes)
        if key not in self._by_size:
            if self._core is None:
                raise EngineFailed("the session is closed")
            self._by_size[key] = self._compile(size, shapes)
        return self._by_size[key]

    def _compile(self, size: int, shapes: _Shapes) -> _Bucket:
        model = self._model.clone()
        if self._batches or self._fixed is None:
            batch = size if self._batches else 1
            model.reshape({spec.name: [batch, *shape] for spec, shape in zip(self.inputs, shapes, strict=True)})
        compiled = self._core.compile_model(model, _DEVICE, self._config)
        return _Bucket(self._openvino, compiled, self.inputs, self.outputs, size, cuts=self._batches)


class _Bucket:
    """One size of the inputs: an infer request, and the arrays of its tensors.

    OpenVINO does not keep these arrays alive. Without the references in this class, the process crashes.
    """

    def __init__(
        self,
        openvino: Any,
        compiled: Any,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        size: int,
        *,
        cuts: bool,
    ) -> None:
        self._request = compiled.create_infer_request()
        self._inputs = [np.zeros(tuple(compiled.input(spec.name).shape), spec.dtype) for spec in inputs]
        ports = [compiled.output(spec.name) for spec in outputs]
        # OpenVINO knows the shapes of some outputs only after a run, such as the padded boxes of an NMS.
        self._unsure = {
            spec.name: (size, *spec.item_shape)
            for spec, port in zip(outputs, ports, strict=True)
            if port.partial_shape.is_dynamic
        }
        if open_name := next((name for name, shape in self._unsure.items() if -1 in shape), ""):
            raise EngineFailed(
                f"openvino knows the shape of output {open_name!r} only after a run, and an axis of this output "
                "varies: build without --buckets, or remove openvino from the profile's engines"
            )
        self._outputs = [
            np.zeros(self._unsure.get(spec.name) or tuple(port.shape), spec.dtype)
            for spec, port in zip(outputs, ports, strict=True)
        ]
        self._cuts = cuts
        for spec, array in zip((*inputs, *outputs), (*self._inputs, *self._outputs), strict=True):
            self._request.set_tensor(spec.name, openvino.Tensor(array, shared_memory=True))

    def run(self, tensors: Sequence[NDArray[Any]], count: int) -> list[NDArray[Any]]:
        # Items after `count` keep values of an earlier batch. Items are independent, and these answers are cut.
        for preset, array in zip(self._inputs, tensors, strict=True):
            preset[:count] = array
        self._request.infer(share_outputs=True)
        for name, shape in self._unsure.items():
            if (found := tuple(self._request.get_tensor(name).shape)) != shape:
                raise EngineFailed(f"openvino gave output {name!r} the shape {list(found)} instead of {list(shape)}")
        return [preset[:count].copy() if self._cuts else preset.copy() for preset in self._outputs]


def _config(options: EngineOptions) -> dict[str, Any]:
    config: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # Several models share the processor. With pinned threads, all models would run on the same cores.
        "ENABLE_CPU_PINNING": False,
        # Otherwise FP32 layers run as bf16 on some processors, and answers differ from the golden answers.
        "INFERENCE_PRECISION_HINT": "f32",
        **exact_int8(),
    }
    if options.threads:
        config["INFERENCE_NUM_THREADS"] = options.threads
    return {**config, **options.extra}


def exact_int8() -> dict[str, str]:
    """Return the settings that make INT8 exact on this processor; none if the default is exact here."""
    return {LOW_PRECISION: "NO"} if int8_saturates() else {}


def sdk() -> Any:
    """Import `openvino` with its telemetry off, and without AMX. Raises EngineMissing."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _ISA_MAX)
    return sdk_of("openvino")


def _reason(error: Exception) -> str:
    """Return the last line of OpenVINO's message, which has the cause; earlier lines are source positions."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
