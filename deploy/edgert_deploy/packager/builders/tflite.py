"""Artifacts for TFLite: ONNX lowered to a float .tflite, quantised to INT8, opened once before it is handed on."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Artifact, Precision
from edgert_deploy.packager.builders.layers import Layer, belongs, layers_of
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.qat import ranges_of
from edgert_deploy.packager.sources.source_model import HEAD, SourceModel, float_proto

FILE_NAME = "model.tflite"
SMOKE_SCRIPT = Path(__file__).parents[1] / "tflite_lowering" / "smoke.py"
TOOLS = ("ai-edge-litert", "onnx", "onnxruntime")
# More samples move the recorded ranges little and cost one float run each.
SAMPLES_MAX = 300
# What an artifact is tried at where its batch is open.
TRIAL_BATCHES = (1, 2)
TRIAL_TIMEOUT_S = 120


class TFLiteBuilder:
    engine = "tflite"

    def build(
        self,
        source: SourceModel,
        calibration: CalibrationSet,
        profile: DeviceProfile,
        precision: Precision,
        out_dir: Path,
        progress: Callable[[str], None],
        float_layers: Sequence[Layer] = (),
    ) -> Artifact:
        tools = _tool_versions()
        # These import onnx and ai-edge-litert.
        from edgert_deploy.packager.tflite_lowering import lower
        from edgert_deploy.packager.tflite_lowering.half import with_half_weights
        from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8

        if source.tflite and source.quantised and precision != "int8":
            raise BuildFailed(
                f"{source.path.name} is quantised already, there is no {precision} in it: build it with --precision int8, "
                "or give the float model"
            )
        if source.kind == "onnx":
            progress("tflite: lowering the ONNX graph")
        content = source.tflite or lower(float_proto(source))
        if precision == "int8" and not (source.tflite and source.quantised):
            progress(f"tflite: calibrating with {min(len(calibration), SAMPLES_MAX)} samples")
            own = ranges_of(source.proto) if source.quantised else {}
            content = quantize_int8(content, _runs(source, calibration), _is_float(source, float_layers), own)
        elif precision == "fp16":
            content = with_half_weights(content)
        path = out_dir / FILE_NAME
        path.write_bytes(content)
        progress("tflite: opening the artifact")
        _smoke_load(path)
        names = tuple(layer.name for layer in float_layers)
        keeps = source.quantised and precision == "int8"
        return Artifact(self.engine, precision, path, (), self.engine, tools, names, keeps)


def _is_float(source: SourceModel, float_layers: Sequence[Layer]) -> Callable[[str], bool]:
    """Whether the operator whose output TFLite calls by a name stays in float."""
    if not float_layers:
        return lambda name: name.startswith(HEAD)
    from edgert_deploy.packager.builders.qdq import prepared

    every = layers_of(prepared(source))
    return lambda name: name.startswith(HEAD) or belongs(name, float_layers, every)


def _tool_versions() -> dict[str, str]:
    try:
        return {tool: importlib.metadata.version(tool) for tool in TOOLS}
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildFailed(f"building for TFLite needs {error.name}: pip install 'edgert[host]'") from error


def _runs(source: SourceModel, calibration: CalibrationSet) -> Iterator[list[NDArray[Any]]]:
    """The samples one run at a time: one each, or as many as a model with a fixed batch takes."""
    batch = max(1, source.inputs[0].shape[0]) if source.inputs[0].shape else 1
    count = min(len(calibration), max(SAMPLES_MAX, batch))
    if count < batch:
        raise BuildFailed(f"the model takes {batch} items a run and there are {count} samples; give at least {batch}")
    for start in range(0, count - batch + 1, batch):
        yield [calibration.inputs[spec.name][start : start + batch] for spec in source.inputs]


def _smoke_load(path: Path) -> None:
    """Open the file as a device would, and run it: an operator or a scale that the runtime refuses shows only there."""
    command = [sys.executable, str(SMOKE_SCRIPT), str(path), *map(str, TRIAL_BATCHES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"TFLite's interpreter ran longer than {TRIAL_TIMEOUT_S} s on the artifact") from error
    if done.returncode:
        words = done.stderr.strip().splitlines()
        reason = words[-1] if words else "no message"
        died = f"died of signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise BuildFailed(f"TFLite's interpreter {died} on the artifact: {reason}; build for another engine")
