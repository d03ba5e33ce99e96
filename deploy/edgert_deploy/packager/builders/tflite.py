"""TFLite artifacts: lowers ONNX to a float .tflite, quantizes it to INT8, and runs the result once.

If TFLite cannot run a model with its open batch, the artifact has a batch of 1, and the engine runs the items of a
batch one by one.

INT8 is full INT8 with calibrated ranges. With the recipe "dynamic-range", only the weights are INT8, and the kernels
quantize the float activations in each run.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgert.engines.tflite import path_for
from edgert.errors import BuildFailed, OperatorUnsupported
from edgert.printable import counted
from edgert.tensors import batchable
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import (
    FIRST_RECIPE,
    Artifact,
    Builder,
    BuildSpec,
    adapt_source,
    artifact_of,
    keeps_quantization,
)
from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer
from edgert_deploy.packager.builders.layers import Layer, belongs, layers_of
from edgert_deploy.packager.builders.qdq import (
    CALIBRATION_SAMPLES_MAX,
    DYNAMIC_RANGE,
    Recipe,
    calibration_feeds,
    is_transformer,
    prepared,
    vendor_tool,
)
from edgert_deploy.packager.builders.tflite_layers import tflite_layers
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import ranges_of
from edgert_deploy.packager.sources.source_model import SourceModel, at_length, float_proto, with_fixed_batch
from edgert_deploy.packager.sources.tflite_model import run_on_zeros

FILE_NAME = "model.tflite"
PERCENTILE = "percentile"
CUT = 0.001  # the share of an activation's values that the recipe "percentile" cuts off at either end
# Devices with this processor have tflite-runtime 2.14. Its FULLY_CONNECTED refuses per-channel scales of INT8 weights
# for float data.
OLD_RUNTIME_MACHINE = "armv7l"
TOOLS = ("ai-edge-litert", "onnx", "onnxruntime")
ONE_BY_ONE = (
    "TFLite cannot run this model with an open batch, so the artifact has a batch of 1: devices run the items of a batch "
    "one by one"
)
# The batch sizes that the build tries on an artifact if its batch is open.
TRIAL_BATCHES = (1, 2)

IsFloat = Callable[[str], bool]  # whether the operator whose output has this name stays in float


class _BatchRefused(BuildFailed):
    """TFLite runs the artifact with one item, but not with more."""


class TFLiteBuilder(Builder):
    engine = "tflite"
    judged_by = "tflite"
    libraries = ("ai-edge-litert", "flatbuffers", "numpy", "onnx", "onnxruntime", "sympy")
    source_kinds = frozenset({"onnx", "tflite"})
    all_recipes = (FIRST_RECIPE, PERCENTILE, DYNAMIC_RANGE)
    accepts_wide_activations = True
    # The folded CAST, TRANSPOSE and MUL run one after the other. With them, a small model took 1.8 to 2.4 times as long
    # as with preprocessing by the device (docs/decisions/0011).
    accepts_folded_preprocessing = False
    ways = ((1, {}), (0, {}), (1, {"experimental_op_resolver_type": "BUILTIN_WITHOUT_DEFAULT_DELEGATES"}))

    def build(
        self, spec: BuildSpec, source: SourceModel, calibration: CalibrationSet, out_dir: Path, progress: Progress
    ) -> Artifact:
        source = adapt_source(source, self.engine)
        tools = _tool_versions()
        _check_spec(spec, source)
        conversion = _Conversion(spec, source, calibration, _is_float(source, spec.float_layers), progress)
        path = out_dir / FILE_NAME
        if source.buckets is None:
            remarks = conversion.write(path)
            return replace(artifact_of(self, spec, source, path, tools), remarks=remarks)
        # TFLite plans memory and folds shapes for one length, so each bucket is a file with its own scales.
        paths = {size: path_for(path, size, source.buckets) for size in source.buckets.sizes}
        found: set[str] = set()
        for size, own_path in paths.items():
            progress(f"tflite: bucket {size}")
            samples = calibration.rows(calibration.sizes == size).cut(size)
            own = replace(conversion, source=at_length(source, size), calibration=samples)
            found.update(own.write(own_path))
        companions = tuple(other for other in paths.values() if other != path)
        return replace(artifact_of(self, spec, source, path, tools, companions), remarks=tuple(sorted(found)))

    def recipe(self, source: SourceModel, profile: DeviceProfile) -> Recipe:
        return Recipe("uint8")

    def recipes(self, source: SourceModel, profile: DeviceProfile) -> tuple[str, ...]:
        if OLD_RUNTIME_MACHINE in profile.machines:
            return (FIRST_RECIPE, PERCENTILE)
        transformer = source.proto is not None and is_transformer(source.proto)
        return (DYNAMIC_RANGE, FIRST_RECIPE) if transformer else self.all_recipes

    def layers(self, path: Path) -> Iterator[ArtifactLayer]:
        return tflite_layers(path)


def _check_spec(spec: BuildSpec, source: SourceModel) -> None:
    """Raise BuildFailed if the source lacks the precision, or if the target cannot run the recipe."""
    if source.tflite and source.quantized and spec.precision != "int8":
        raise BuildFailed(
            f"{source.path.name} is quantized, so it holds no {spec.precision} weights: "
            "build it with --precision int8 and without --with-reference, or give the float model"
        )
    if spec.recipe == DYNAMIC_RANGE and OLD_RUNTIME_MACHINE in spec.profile.machines:
        raise BuildFailed(
            f"{spec.profile.name} may run tflite-runtime 2.14, which cannot load the recipe {DYNAMIC_RANGE}: "
            f"build it with --recipe {FIRST_RECIPE}"
        )


@dataclass(frozen=True)
class _Conversion:
    """The conversion of a source to one .tflite file."""

    spec: BuildSpec
    source: SourceModel
    calibration: CalibrationSet
    is_float: IsFloat
    progress: Progress

    def write(self, path: Path) -> tuple[str, ...]:
        """Write the file to `path` and run it once; return the remarks for the user."""
        try:
            self._write(path)
            return ()
        except (OperatorUnsupported, _BatchRefused):  # any other failure has a reason that a batch of 1 does not change
            if self.source.proto is None or not batchable((*self.source.inputs, *self.source.outputs)):
                raise
        self.progress("tflite: building the artifact with a batch of 1")
        replace(self, source=with_fixed_batch(self.source))._write(path)
        return (ONE_BY_ONE,)

    def _write(self, path: Path) -> None:
        path.write_bytes(self._content())
        self.progress("tflite: running the artifact once")
        _run_on_zeros(path)

    def _content(self) -> bytes:
        """Return the .tflite file of the source in the precision of the spec."""
        # Imported here, because these modules import onnx and ai-edge-litert.
        from edgert_deploy.packager.tflite_lowering import lower
        from edgert_deploy.packager.tflite_lowering.builtin_operators import with_builtin_operators
        from edgert_deploy.packager.tflite_lowering.weights import with_half_weights, with_shared_weights

        source = self.source
        if source.tflite:
            content = source.tflite if source.quantized else with_builtin_operators(source.tflite)
        else:
            self.progress("tflite: lowering the ONNX graph")
            full_int8 = self.spec.precision == "int8" and self.spec.recipe != DYNAMIC_RANGE
            content = lower(float_proto(source), share_weights=not self.spec.float_layers, for_int8=full_int8)
        if self.spec.precision == "int8" and not (source.tflite and source.quantized):
            content = self._quantized(content)
        elif self.spec.precision == "fp16":
            content = with_half_weights(content)
        return content if source.tflite else with_shared_weights(content)

    def _quantized(self, content: bytes) -> bytes:
        """Return the float file `content`, quantized by the recipe of the spec."""
        from edgert_deploy.packager.tflite_lowering.dynamic_range import with_int8_weights
        from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
        from edgert_deploy.packager.tflite_lowering.weights import with_plain_weights

        source = self.source
        with vendor_tool(f"TFLite's tools cannot quantize {source.path.name}", "build it with --precision auto"):
            content = with_plain_weights(content) if source.tflite else content
        if self.spec.recipe == DYNAMIC_RANGE:
            self.progress("tflite: quantizing the weights")
            return with_int8_weights(content, self.is_float)
        samples = min(len(self.calibration), CALIBRATION_SAMPLES_MAX)
        self.progress(f"tflite: quantizing with {counted(samples, 'sample')}")
        feeds = calibration_feeds(self.calibration)
        runs = ([feed[spec.name] for spec in source.inputs] for feed in feeds)
        own_ranges = ranges_of(source.proto) if keeps_quantization(self.spec, source) else {}
        cut = CUT if self.spec.recipe == PERCENTILE else 0.0
        return quantize_int8(content, runs, self.is_float, own_ranges, cut)


def _is_float(source: SourceModel, float_layers: tuple[Layer, ...]) -> IsFloat:
    """Return a function that tells from the name of an operator's output whether it stays in float."""
    if not float_layers:
        return lambda name: False
    every = layers_of(prepared(source))
    return lambda name: belongs(name, float_layers, every)


def _tool_versions() -> dict[str, str]:
    try:
        return {tool: importlib.metadata.version(tool) for tool in TOOLS}
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildFailed(f"building for TFLite needs {error.name}: pip install 'edgert[host]'") from error


def _run_on_zeros(path: Path) -> None:
    """Run the file on zeros, because TFLite may refuse an operator or a scale only in a run."""
    for batch in TRIAL_BATCHES:
        try:
            _run_once(path, batch)
        except (RuntimeError, ValueError) as error:
            kind = BuildFailed if batch == 1 else _BatchRefused
            raise kind(f"TFLite's interpreter refuses the artifact: {error}; build for another engine") from error


def _run_once(path: Path, batch: int) -> None:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    for detail in interpreter.get_input_details():
        if -1 in detail["shape_signature"]:
            shape = [batch if length == -1 else int(length) for length in detail["shape_signature"]]
            interpreter.resize_tensor_input(detail["index"], shape)
    run_on_zeros(interpreter)
