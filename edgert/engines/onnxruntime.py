"""ONNX Runtime: the engine that installs nearly everywhere.

A session calls the binding's `run` directly, without the Python wrapper: the wrapper repeats checks that the server has
already made. The call returns new arrays, and is as fast as preset I/O bindings that copy the answer. Batches of any
size run unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines import Engine, EngineOptions, LocalArtifact, Session, closed, sdk_of
from edgert.errors import EngineFailed
from edgert.machine import int8_saturates
from edgert.tensors import TensorSpec

_EXACT_INT8 = "session.x64quantprecision"
_LOG_FATAL_ONLY = 4
# An ONNX model of IR version 8 and opset 13: y = Identity(x), both FP32 of shape [1].
IDENTITY = bytes.fromhex(
    "0808"
    "3a37"
    "0a100a017812017922084964656e74697479"
    "120167"
    "5a0f0a0178120a0a08080112040a020801"
    "620f0a0179120a0a08080112040a020801"
    "42040a00100d"
)


class ONNXRuntimeEngine(Engine):
    name = "onnxruntime"

    def version(self) -> str:
        return str(sdk().__version__)

    def before_fork(self) -> None:
        onnxruntime = sdk()
        session = onnxruntime.InferenceSession(
            IDENTITY, _session_options(onnxruntime, EngineOptions(threads=1)), providers=["CPUExecutionProvider"]
        )
        session.run(None, {"x": np.zeros(1, np.float32)})

    def load(self, artifact: LocalArtifact, options: EngineOptions) -> ONNXRuntimeSession:
        onnxruntime = sdk()
        try:
            session = _exact_session(onnxruntime, str(artifact.path), _session_options(onnxruntime, options))
        except Exception as error:  # the SDK's exceptions share no base class
            raise EngineFailed(
                f"onnxruntime {onnxruntime.__version__} cannot load {artifact.path.name}: {error}; "
                "build the model again, or use a newer onnxruntime"
            ) from error
        _expect_names("input", artifact.inputs, [value.name for value in session.get_inputs()])
        _expect_names("output", artifact.outputs, [value.name for value in session.get_outputs()])
        return ONNXRuntimeSession(session, artifact.inputs, artifact.outputs)


class ONNXRuntimeSession(Session):
    def __init__(self, session: Any, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._input_names = [spec.name for spec in inputs]
        self._output_names = [spec.name for spec in outputs]
        self._session = session  # kept, because the inner session alone does not own the model
        self._run = getattr(session, "_sess", session).run
        self._shrinking = sdk().RunOptions()  # without this, the arena keeps the size of the largest run
        self._shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def run(self, tensors: Sequence[NDArray[Any]], options: Any = None) -> list[NDArray[Any]]:
        try:
            answers: list[NDArray[Any]] = self._run(
                self._output_names, dict(zip(self._input_names, tensors, strict=True)), options
            )
        except Exception as error:  # the SDK's exceptions share no base class
            raise EngineFailed(f"onnxruntime cannot run this batch: {error}") from error
        return answers

    def release_memory(self, sample: Sequence[NDArray[Any]]) -> None:
        self.run(sample, self._shrinking)

    def close(self) -> None:
        self._run = closed
        self._session = None


def sdk() -> Any:
    """Import `onnxruntime` with its telemetry off. Raises EngineMissing."""
    return sdk_of("onnxruntime")


def compute_int8_exactly(session_options: Any) -> None:
    """Compute sums of INT8 products exactly on processors where they would saturate (docs/decisions/0033)."""
    # On other processors, this option would only make INT8 slower.
    if int8_saturates():
        session_options.add_session_config_entry(_EXACT_INT8, "1")


def _exact_session(onnxruntime: Any, path: str, options: Any) -> Any:
    """Return a session; its INT8 products are exact if ONNX Runtime can compute the model exactly."""
    more: dict[str, Any] = {}
    for _ in range(2):
        try:
            return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], **more)
        except Exception as error:
            if not int8_saturates():
                raise
            if "NOT_IMPLEMENTED" in str(error):
                # ONNX Runtime has no exact QGemm for INT8 activations (format QOperator).
                options.add_session_config_entry(_EXACT_INT8, "0")
            elif "Attempt to replace the existing tensor" in str(error):
                # ONNX Runtime converts a quantized constant to UINT8 again for each node that reads it, and then fails.
                # Without this conversion, products of INT8 are exact, too, but slower.
                more["disabled_optimizers"] = ["QDQS8ToU8Transformer"]
            else:
                raise
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], **more)


def _session_options(onnxruntime: Any, options: EngineOptions) -> Any:
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = options.threads
    session_options.inter_op_num_threads = 1
    if level := options.extra.get("graph_optimization_level"):
        session_options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    # Errors become exceptions, and other lines would fill the daemon's log.
    session_options.log_severity_level = _LOG_FATAL_ONLY
    # Spinning threads slow preprocessing and other models: under load, p90 was 17 ms with them, 7.7 ms without them.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    compute_int8_exactly(session_options)
    return session_options


def _expect_names(kind: str, specs: tuple[TensorSpec, ...], names: list[str]) -> None:
    missing = [spec.name for spec in specs if spec.name not in names]
    if missing:
        raise EngineFailed(
            f"the ONNX model has no {kind} {', '.join(missing)} (it has {', '.join(names)}): build it again"
        )
