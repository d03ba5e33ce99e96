"""OpenVINO artifacts, quantized by NNCF after the training.

`Core.read_model` reads the ONNX file. `convert_model` would only add notes about its call. The builder removes the
notes of the converter and of NNCF from the IR's XML.
"""

from __future__ import annotations

import logging
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines.openvino import LOW_PRECISION, exact_int8, sdk
from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Artifact, Builder, BuildSpec, adapt_source, artifact_of, keeps_quantization
from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer
from edgert_deploy.packager.builders.layers import belongs, layers_of
from edgert_deploy.packager.builders.openvino_layers import RECURRENT, WEIGHTED, openvino_layers
from edgert_deploy.packager.builders.openvino_rewrites import (
    separate_heads,
    separate_products,
    split_gathered,
    with_products,
)
from edgert_deploy.packager.builders.qdq import (
    CALIBRATION_SAMPLES_MAX,
    Recipe,
    calibration_feeds,
    is_transformer,
    only_in_float,
    prepared,
    vendor_tool,
)
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.branches import control_flow
from edgert_deploy.packager.sources.onnx_graph.nodes import nodes_of
from edgert_deploy.packager.sources.onnx_graph.rewrites.resize_matrices import needs_matrices
from edgert_deploy.packager.sources.source_model import Fold, SourceModel, float_proto

NO_OPERATORS = ("Parameter", "Result", "Constant")


class OpenVINOBuilder(Builder):
    engine = "openvino"
    judged_by = "openvino"
    libraries = ("nncf", "numpy", "onnx", "onnxruntime", "openvino", "scipy", "sympy")
    all_recipes = ("min-max", "nncf", "float-tail", "nncf-transformer")
    # The last configuration computes INT8 as the other kind of processor does: in FP32 if this one uses INT8
    # instructions, and with INT8 instructions if this one uses FP32.
    ways = ((1, {}), (0, {}), (1, {LOW_PRECISION: "YES" if exact_int8() else "NO"}))

    def build(
        self, spec: BuildSpec, source: SourceModel, calibration: CalibrationSet, out_dir: Path, progress: Progress
    ) -> Artifact:
        source = adapt_source(source, self.engine)
        quantizes = spec.precision == "int8" and not keeps_quantization(spec, source)
        progress(f"openvino: {'quantizing with NNCF' if quantizes else 'converting'}")
        path = out_dir / "model.xml"
        advice = "export the model with opset 17, or remove openvino from the profile's engines"
        if quantizes:
            advice = f"build this target with --precision fp32, {advice}"
        with vendor_tool(f"openvino could not build {source.path.name}", advice):
            versions = _write(spec, source, calibration, path)
        _strip_notes(path, source.proto)
        return artifact_of(self, spec, source, path, versions, (path.with_suffix(".bin"),))

    def recipe(self, source: SourceModel, profile: DeviceProfile) -> Recipe:
        return Recipe("uint8")

    def recipes(self, source: SourceModel, profile: DeviceProfile) -> tuple[str, ...]:
        if is_transformer(source.proto):
            return ("min-max", "nncf-transformer", "nncf")
        return self.all_recipes

    def layers(self, path: Path) -> Iterator[ArtifactLayer]:
        return openvino_layers(path)


def unread_nodes(report: str) -> str:
    """Return the nodes that OpenVINO's reader cannot read, and the reasons, from its error `report`.

    A report without nodes is returned unchanged. The result omits nodes that OpenVINO cannot read only because an
    earlier unread node left the rank of their inputs unknown.
    """
    if unknown := re.search(r"No conversion rule found for operations: (.+)", report):
        return f"it does not know {unknown[1]}"
    found = re.findall(r"ONNX node '<Node\((\w+)\): (.*?)>'(.*?)(?:\n\s*\n|\Z)", report, re.DOTALL)
    reasons = [f"{op} {name!r}: {rest.strip().splitlines()[-1]}" for op, name, rest in found if rest.strip()]
    own = [reason for reason in reasons if "rank has to be known" not in reason]
    return "; ".join(own or reasons) or report


def _check_resizes(proto: Any) -> None:
    """Raise BuildFailed for a Resize that OpenVINO computes wrongly.

    sources/ has replaced each such Resize of known lengths.
    """
    for node in filter(needs_matrices, nodes_of(proto.graph)):
        raise BuildFailed(
            f"openvino ignores options of Resize {node.name or node.output[0]!r}, so its answers would be wrong: export the model "
            "with fixed lengths, or without antialiasing and exclude_outside, or remove openvino from the profile's engines"
        )


def _write(spec: BuildSpec, source: SourceModel, calibration: CalibrationSet, path: Path) -> dict[str, str]:
    openvino = sdk()
    bare = source if source.fold is None else replace(source, proto=source.fold.inner)
    proto = with_products(bare.proto if spec.precision == "int8" else float_proto(bare))
    _check_resizes(proto)
    versions = {"openvino": openvino.__version__.split("-")[0]}
    advice = "export the model without that operator, or remove openvino from the profile's engines"
    with vendor_tool(f"openvino cannot read {source.path.name}", advice):
        try:
            model = openvino.Core().read_model(proto.SerializeToString(deterministic=True))
        except RuntimeError as error:
            raise RuntimeError(unread_nodes(str(error))) from error
    split_gathered(openvino, model)
    separate_products(openvino, model)
    separate_heads(openvino, model, source.buckets.sizes if source.buckets else ())
    if source.fold is not None:
        model = _folded(openvino, model, source.fold)
    if spec.precision == "int8" and not source.quantized:
        import nncf

        nncf.set_log_level(logging.ERROR)
        versions["nncf"] = nncf.__version__
        _fold_constants(model)
        try:
            model = _quantized(nncf, model, source, calibration, spec)
        except Exception as error:
            if nodes := control_flow(source.proto):  # not refused earlier, because NNCF accepts some of these nodes
                raise BuildFailed(only_in_float(source, nodes, "NNCF fails on it")) from error
            raise
    # FP16 weights would change an FP32 reference, and the layers that an INT8 model keeps in float for its accuracy.
    openvino.save_model(model, path, compress_to_fp16=spec.precision == "fp16")
    return versions


def _folded(openvino: Any, model: Any, fold: Fold) -> Any:
    """Return the model with preprocessing by OpenVINO in front: (value - mean / scale) / (std / scale)."""
    from openvino.preprocess import PrePostProcessor

    factor, shift = fold.factor_and_shift()
    processor = PrePostProcessor(model)
    frames = processor.input(fold.input)
    frames.tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout(fold.layout.upper()))
    frames.model().set_layout(openvino.Layout(fold.model_layout.upper()))
    steps = frames.preprocess().convert_element_type(openvino.Type.f32)
    if fold.flips:
        steps.reverse_channels()
    steps.mean(_numbers(-shift / factor)).scale(_numbers(1 / factor))
    return processor.build()


def _fold_constants(model: Any) -> None:
    """Compute the values that depend only on constants.

    OpenVINO's reader of ONNX reshapes the weights of a grouped convolution to a computed shape. Without this folding,
    OpenVINO would compute such a layer in float, even if its data is quantized.
    """
    from openvino.passes import ConstantFolding, Manager

    manager = Manager()
    manager.register_pass(ConstantFolding())
    manager.run_passes(model)


def _numbers(values: NDArray[np.float64]) -> float | list[float]:
    return float(values[0]) if values.size == 1 else [float(value) for value in values]


def _ignored(nncf: Any, model: Any, source: SourceModel, spec: BuildSpec) -> Any:
    """Return the operators that NNCF leaves in float: by `spec.float_layers`, and by the recipe."""
    names: list[str] = []
    if spec.recipe == "float-tail":
        # For a single sample, OpenVINO computes recurrent layers in INT8 with much less accuracy.
        recurrent = (op for op in model.get_ordered_ops() if op.get_type_name() in RECURRENT)
        names = [*_tail(model), *(op.get_friendly_name() for op in recurrent)]
    if spec.float_layers:
        every = layers_of(prepared(source))
        own = [op.get_friendly_name() for op in model.get_ordered_ops() if op.get_type_name() not in NO_OPERATORS]
        names += [name for name in own if name not in names and belongs(name, spec.float_layers, every)]
    return nncf.IgnoredScope(names=names, validate=False) if names else None


def _tail(model: Any) -> list[str]:
    """Return the operators between the last weights and the outputs, such as the end of a detector's head."""
    names: set[str] = set()
    waiting = [result.input_value(0).get_node() for result in model.get_results()]
    while waiting:
        node = waiting.pop()
        if node.get_friendly_name() not in names and node.get_type_name() not in WEIGHTED | set(NO_OPERATORS):
            names.add(node.get_friendly_name())
            waiting += [port.get_source_output().get_node() for port in node.inputs()]
    return sorted(names)


def _quantized(nncf: Any, model: Any, source: SourceModel, calibration: CalibrationSet, spec: BuildSpec) -> Any:
    transformer = is_transformer(source.proto)
    advanced = None
    if spec.recipe in ("", "min-max"):
        ranges = nncf.quantization.range_estimator.RangeEstimatorParametersSet
        advanced = nncf.AdvancedQuantizationParameters(
            # NNCF's default range is the mean of each sample's extremes, which clips values. On small networks, the
            # default gave a cosine of .87 to .95, and MINMAX gave .9999. On large trained networks, the default is
            # better (bench/zoo).
            activations_range_estimator_params=ranges.MINMAX,
            # With smoothing, the cosine of a transformer whose queries, keys and values share one input was .01.
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1),
        )
    elif spec.recipe == "nncf-transformer":
        transformer = (
            True  # NNCF then smooths and leaves attention in float; this helps some convolutional networks, too
        )
    return nncf.quantize(
        model,
        nncf.Dataset(list(calibration_feeds(calibration))),
        preset=nncf.QuantizationPreset.MIXED,
        ignored_scope=_ignored(nncf, model, source, spec),
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
        subset_size=min(CALIBRATION_SAMPLES_MAX, len(calibration)),
        advanced_parameters=advanced,
    )


def _strip_notes(path: Path, proto: Any) -> None:
    """Remove the `rt_info` and the name of the model, which describe the build.

    OpenVINO numbers the operators that it adds, through all models of a process. In the file, each number is an id.
    """
    own = {name for node in nodes_of(proto.graph) for name in (node.name, *node.output)}
    tree = ElementTree.parse(path)
    root = tree.getroot()
    root.set("name", "model")
    for notes in root.findall("rt_info"):
        root.remove(notes)
    for layer in root.iter("layer"):
        name = str(layer.get("name"))
        if name not in own and (made := re.fullmatch(r"([A-Z]\w*_)\d+", name)):
            layer.set("name", f"{made[1]}{layer.get('id')}")
    for element in root.iter():  # indentation is a quarter of a small model's file
        element.text = (element.text or "").strip() or None
        element.tail = None
    tree.write(path, encoding="utf-8", xml_declaration=True)
