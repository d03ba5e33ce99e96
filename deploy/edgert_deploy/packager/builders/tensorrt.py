"""TensorRT artifacts: an audited S8S8 Q/DQ graph, from which the device builds its own engine.

A TensorRT engine fits one GPU and one version only, so what is packed is the ONNX graph. TensorRT
refuses int32 bias and non-zero zero points, and reads uint8 with zero point 0 as int8 without a word
(accuracy .993 -> .508 was seen): `audit` refuses all of that here, where somebody can act on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Artifact, Precision
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.builders.qdq import (
    Recipe,
    is_transformer,
    quantize,
    raised,
    to_fp16,
    tool_versions,
    write_proto,
)
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, float_proto

HALF_OPSET = 19  # the first whose QuantizeLinear and DequantizeLinear take FP16
TRANSFORMER_OPS = ("MatMul", "Gemm")
OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "AveragePool", "GlobalAveragePool", "MaxPool", "Clip", "Relu")
OPTIONS = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "QuantizeBias": False,  # TensorRT takes a bias in float only
    "AddQDQPairToWeight": False,  # weights are stored as INT8, not as FP32 to be quantised there
}
# Quantised operators of ONNX other than Q/DQ: none of them is TensorRT's.
OTHER_QUANTISED_OPS = (
    "ConvInteger",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "QLinearConv",
    "QLinearMatMul",
)


class TensorRTBuilder:
    engine = "tensorrt"

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
        keeps = source.quantised and precision.startswith("int8")
        proto = source.proto if keeps else float_proto(source)
        if keeps:
            progress("tensorrt: auditing the model's own quantisation")
        elif precision.startswith("int8"):
            progress("tensorrt: quantising (int8 activations, zero point 0)")
            proto = quantize(source, calibration, recipe_for(source), float_layers)
        if precision.endswith("fp16"):
            proto = to_fp16(raised(proto, HALF_OPSET) if precision.startswith("int8") else proto, source)
        audit(proto)
        path = out_dir / "model.onnx"
        write_proto(proto, path)
        names = tuple(layer.name for layer in float_layers)
        return Artifact(self.engine, precision, path, (), "onnxruntime", tool_versions(), names, keeps)


def recipe_for(source: SourceModel) -> Recipe:
    return Recipe("int8", TRANSFORMER_OPS if is_transformer(source.proto) else OPS, OPTIONS)


def audit(proto: Any) -> None:
    """Raise BuildFailed, naming the node, if TensorRT would refuse or misread how `proto` is quantised."""
    constants = dict(_constants(proto.graph))
    for node in _nodes(proto.graph):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            problem = _problem(node, constants)
        elif node.op_type in OTHER_QUANTISED_OPS:
            problem = "TensorRT quantises with QuantizeLinear and DequantizeLinear only"
        else:
            continue
        if problem:
            raise BuildFailed(
                f"TensorRT would not take {node.op_type} node {(node.name or node.output[0])!r}: {problem}. "
                "Give the FP32 model to edgert build, or build this target with --precision fp32"
            )


def _problem(node: Any, constants: dict[str, Any]) -> str | None:
    """What is wrong with a QuantizeLinear or DequantizeLinear, None where nothing is."""
    names = [*node.input, "", ""][:3]
    data, scale, zero_point = (constants.get(name) for name in names)
    if node.op_type == "DequantizeLinear" and data is not None and data.dtype != np.int8:
        what = "an int32 bias" if data.dtype == np.int32 else f"{data.dtype} data"
        return f"{what} is dequantised; only int8 may be"
    if scale is None:
        return "its scale is computed while the model runs; it must be a constant"
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return "a scale is not a positive number"
    if not names[2]:
        # ONNX's default type is uint8; a DequantizeLinear takes the type of its data, checked above or at its Q.
        return "it has no zero point, which means uint8" if node.op_type == "QuantizeLinear" else None
    if zero_point is None:
        return "its zero point is computed while the model runs; it must be a constant"
    if zero_point.dtype != np.int8:
        return f"its zero point is {zero_point.dtype}; only int8 is read as what it is"
    if zero_point.any():
        return f"its zero point is {int(zero_point.flat[np.flatnonzero(zero_point)[0]])}; it must be 0 (symmetric)"
    return None


def _nodes(graph: Any) -> Iterator[Any]:
    """Every node of `graph` and of the graphs inside its nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _nodes(inner)


def _constants(graph: Any) -> Iterator[tuple[str, Any]]:
    from onnx import numpy_helper

    for tensor in graph.initializer:
        yield tensor.name, numpy_helper.to_array(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                yield node.output[0], numpy_helper.to_array(attribute.t)
            for inner in [attribute.g, *attribute.graphs]:
                yield from _constants(inner)
