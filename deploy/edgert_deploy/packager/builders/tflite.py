"""TFLite artifacts: ONNX lowered to a float .tflite, quantised to INT8, and run once before it is packed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Artifact, Builder, Order, keeps_quantisation
from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer
from edgert_deploy.packager.builders.layers import Layer, belongs, layers_of
from edgert_deploy.packager.builders.qdq import Recipe, prepared
from edgert_deploy.packager.builders.tflite_layers import tflite_layers
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sandbox import Progress
from edgert_deploy.packager.sources.qat import ranges_of
from edgert_deploy.packager.sources.source_model import SourceModel, float_proto

FILE_NAME = "model.tflite"
TOOLS = ("ai-edge-litert", "onnx", "onnxruntime")
# More samples move the recorded ranges little and cost one float run each.
SAMPLES_MAX = 300
# The batches that an artifact is tried with where its batch is open.
TRIAL_BATCHES = (1, 2)


class TFLiteBuilder(Builder):
    engine = "tflite"
    judged_by = "tflite"
    libraries = ("ai-edge-litert", "flatbuffers", "numpy", "onnx", "onnxruntime", "sympy")
    source_kinds = frozenset({"onnx", "tflite"})
    takes_folded = False  # CAST, TRANSPOSE and MUL run one after the other: 1.8 to 2.4 times as long
    ways = ((1, {}), (0, {}), (1, {"experimental_op_resolver_type": "BUILTIN_WITHOUT_DEFAULT_DELEGATES"}))

    def build(
        self, order: Order, source: SourceModel, calibration: CalibrationSet, out_dir: Path, progress: Progress
    ) -> Artifact:
        tools = _tool_versions()
        # These import onnx and ai-edge-litert.
        from edgert_deploy.packager.tflite_lowering import lower
        from edgert_deploy.packager.tflite_lowering.half import with_half_weights
        from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8

        if source.tflite and source.quantised and order.precision != "int8":
            raise BuildFailed(
                f"{source.path.name} is quantised, so it holds no {order.precision} weights: "
                "build it with --precision int8, or give the float model"
            )
        if source.kind == "onnx":
            progress("tflite: lowering the ONNX graph")
        content = source.tflite or lower(float_proto(source))
        if order.precision == "int8" and not (source.tflite and source.quantised):
            progress(f"tflite: quantising with {min(len(calibration), SAMPLES_MAX)} samples")
            own = ranges_of(source.proto) if keeps_quantisation(order, source) else {}
            content = quantize_int8(content, _runs(source, calibration), _is_float(source, order.float_layers), own)
        elif order.precision == "fp16":
            content = with_half_weights(content)
        path = out_dir / FILE_NAME
        path.write_bytes(content)
        progress("tflite: running the artifact once")
        _try(path)
        return self.made(order, source, path, tools)

    def recipe(self, source: SourceModel, profile: DeviceProfile) -> Recipe:
        return Recipe("uint8")

    def layers(self, path: Path) -> Iterator[ArtifactLayer]:
        return tflite_layers(path)


def _is_float(source: SourceModel, float_layers: tuple[Layer, ...]) -> Callable[[str], bool]:
    """Return a function: whether the operator whose output TFLite calls by a name stays in float."""
    if not float_layers:
        return lambda name: False
    every = layers_of(prepared(source))
    return lambda name: belongs(name, float_layers, every)


def _tool_versions() -> dict[str, str]:
    try:
        return {tool: importlib.metadata.version(tool) for tool in TOOLS}
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildFailed(f"building for TFLite needs {error.name}: pip install 'edgert[host]'") from error


def _runs(source: SourceModel, calibration: CalibrationSet) -> Iterator[list[NDArray[Any]]]:
    """Yield the samples one run at a time: one each, or as many as a model with a fixed batch takes."""
    batch = max(1, source.inputs[0].shape[0]) if source.inputs[0].shape else 1
    count = min(len(calibration), max(SAMPLES_MAX, batch))
    if count < batch:
        raise BuildFailed(f"the model takes {batch} items a run and there are {count} samples; give at least {batch}")
    for start in range(0, count - batch + 1, batch):
        yield [calibration.inputs[spec.name][start : start + batch] for spec in source.inputs]


def _try(path: Path) -> None:
    """Run the file on zeros as a device would: only then does the runtime refuse an operator or a scale, or abort."""
    try:
        for batch in TRIAL_BATCHES:
            _run_once(path, batch)
    except (RuntimeError, ValueError) as error:
        raise BuildFailed(f"TFLite's interpreter refuses the artifact: {error}; build for another engine") from error


def _run_once(path: Path, batch: int) -> None:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    for detail in interpreter.get_input_details():
        if -1 in detail["shape_signature"]:
            shape = [batch if length == -1 else int(length) for length in detail["shape_signature"]]
            interpreter.resize_tensor_input(detail["index"], shape)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], np.zeros(detail["shape"], detail["dtype"]))
    interpreter.invoke()
