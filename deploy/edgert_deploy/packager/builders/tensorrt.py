"""TensorRT artifacts: an audited S8S8 Q/DQ graph, from which the device builds its own engine.

The artifact is an ONNX graph, because a TensorRT engine fits only one GPU and one version. TensorRT refuses an int32
bias, and zero points other than zero. It reads uint8 with zero point 0 as int8 without an error (the accuracy of a
model fell from .993 to .508). So `audit` refuses these graphs on the host, where the user can still change the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgert.errors import BuildFailed, OperatorUnsupported
from edgert.printable import counted
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import (
    Artifact,
    Builder,
    BuildSpec,
    adapt_source,
    artifact_of,
    keeps_quantization,
    qdq,
)
from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer
from edgert_deploy.packager.builders.onnx_layers import onnx_layers
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.branches import remove_unused
from edgert_deploy.packager.sources.onnx_graph.nodes import Constants, copy_of, nodes_of, refill
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import QUANTIZED_ARITHMETIC
from edgert_deploy.packager.sources.source_model import SourceModel, float_proto

HALF_OPSET = 19  # the first opset whose QuantizeLinear and DequantizeLinear accept FP16
OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "AveragePool", "GlobalAveragePool", "MaxPool", "Clip", "Relu")
OPTIONS = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "QuantizeBias": False,  # TensorRT accepts a bias only in float
    "AddQDQPairToWeight": False,  # weights are then stored as INT8, not as FP32
    # TensorRT's kernels write floats, and the next layer's Q is fused into them. Source: NVIDIA TensorRT documentation,
    # "Working with Quantized Types", Q/DQ placement: by default, do not quantize the outputs of weighted operations.
    "OpTypesToExcludeOutputQuantization": list(qdq.HEAVY_OPS),
}
# Operators that TensorRT's ONNX parser does not know (`supports_operator` of TensorRT-RTX 1.7). Two kinds are left out:
# quantized operators, for which there is other advice, and DeformConv, because a plugin of TensorRT may compute it.
UNKNOWN = frozenset(
    ["AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"]
    + ["CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "CumProd", "DFT", "Det", "ImageDecoder"]
    + ["MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss", "Optional"]
    + ["OptionalGetElement", "OptionalHasElement", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty"]
    + ["SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence"]
    + ["StringConcat", "StringNormalizer", "StringSplit", "SwiGLU", "TfIdfVectorizer", "Unique"]
)


class TensorRTBuilder(Builder):
    engine = "tensorrt"
    judged_by = "onnxruntime"  # ONNX Runtime reads the same graph
    libraries = qdq.LIBRARIES
    all_recipes = qdq.RECIPES
    # On a GPU, "int8fp16" may be faster than "int8". This host can only compare their sizes.
    timed_beside_int8 = ("int8fp16",)
    # This host cannot run TensorRT's kernels, and they may use TF32.
    tolerance_times = 2.0
    tolerance_floor = 0.02

    def build(
        self, spec: BuildSpec, source: SourceModel, calibration: CalibrationSet, out_dir: Path, progress: Progress
    ) -> Artifact:
        source = adapt_source(source, self.engine)
        if keeps_quantization(spec, source):
            progress("tensorrt: checking the model's own quantization")
            proto = with_float_biases(source.proto)
        elif spec.precision.startswith("int8"):
            progress("tensorrt: quantizing (int8 activations, zero point 0)")
            recipe = qdq.recipe_variant(self.recipe(source, spec.profile), spec.recipe)
            proto = qdq.quantize(source, calibration, recipe, spec.float_layers)
        else:
            proto = float_proto(source)
        if spec.precision.endswith("fp16"):
            proto = qdq.to_fp16(
                qdq.at_least_opset(proto, HALF_OPSET) if spec.precision == "int8fp16" else proto, source
            )
        audit(proto)
        qdq.write_proto(proto, out_dir / "model.onnx")
        return artifact_of(self, spec, source, out_dir / "model.onnx", qdq.tool_versions())

    def recipe(self, source: SourceModel, profile: DeviceProfile) -> qdq.Recipe:
        return qdq.Recipe("int8", qdq.HEAVY_OPS if qdq.is_transformer(source.proto) else OPS, OPTIONS)

    def recipes(self, source: SourceModel, profile: DeviceProfile) -> tuple[str, ...]:
        return qdq.recipes(source.proto)

    def layers(self, path: Path) -> Iterator[ArtifactLayer]:
        return onnx_layers(path)


def with_float_biases(proto: Any) -> Any:
    """Return the model with float biases in place of the INT32 biases of ONNX Runtime's quantizer."""
    from onnx import numpy_helper

    proto = copy_of(proto)
    constants, kept = Constants(proto), []
    for node in proto.graph.node:
        data = constants.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        scale = None if data is None else constants.get(node.input[1])
        if data is None or scale is None or data.dtype != np.int32:
            kept.append(node)
            continue
        bias = np.asarray(data.astype(np.float64) * scale, np.float32)  # ONNX: the zero point of INT32 data is 0
        proto.graph.initializer.append(numpy_helper.from_array(bias, node.output[0]))
    refill(proto.graph.node, kept)
    remove_unused(proto.graph)
    return proto


def audit(proto: Any) -> None:
    """Raise an error for a node of `proto` that TensorRT would refuse or misread.

    Raises OperatorUnsupported for operators that it does not know, and BuildFailed for a quantization.
    """
    nodes = list(nodes_of(proto.graph))
    unknown = [f"{node.op_type} (node {(node.name or node.output[0])!r})" for node in nodes if node.op_type in UNKNOWN]
    if unknown:
        raise OperatorUnsupported(
            f"TensorRT does not know {counted(len(unknown), 'operator')} of this model: {', '.join(unknown[:8])}. "
            "Export the model without them, or remove tensorrt from the profile's engines"
        )
    constants = Constants(proto)
    for node in nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            problem = _problem(node, constants)
        elif node.op_type in QUANTIZED_ARITHMETIC:
            problem = "TensorRT quantizes with QuantizeLinear and DequantizeLinear only"
        else:
            continue
        if problem:
            raise BuildFailed(
                f"TensorRT does not accept {node.op_type} node {(node.name or node.output[0])!r}: {problem}. "
                "Give the FP32 model to edgert build, or build this target with --precision fp32"
            )


def _problem(node: Any, constants: Constants) -> str | None:
    """Return the fault of a QuantizeLinear or DequantizeLinear, or None."""
    names = [*node.input, "", ""][:3]
    data, scale, zero_point = (constants.get(name) for name in names)
    if node.op_type == "DequantizeLinear" and data is not None and data.dtype != np.int8:
        what = "an int32 bias" if data.dtype == np.int32 else f"{data.dtype} data"
        return f"it dequantizes {what}; only int8 is allowed"
    if scale is None:
        return "its scale is computed while the model runs; it must be a constant"
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return "a scale is not a positive number"
    if not names[2]:
        # For a QuantizeLinear, ONNX's default is uint8. A DequantizeLinear has the type of its data, which is checked
        # above or at the QuantizeLinear.
        return "it has no zero point, which means uint8" if node.op_type == "QuantizeLinear" else None
    if zero_point is None:
        return "its zero point is computed while the model runs; it must be a constant"
    if zero_point.dtype != np.int8:
        return f"its zero point is {zero_point.dtype}; TensorRT reads any type as int8, so it must be int8"
    if zero_point.any():
        return f"its zero point is {int(zero_point.flat[np.flatnonzero(zero_point)[0]])}; it must be 0 (symmetric)"
    return None
