"""Q/DQ quantization of an ONNX graph by ONNX Runtime's tools, for onnxruntime and tensorrt.

The quantization is static: weights have scales per channel, and activations have ranges over the calibration set. The
engines differ only in the recipe. With "dynamic-range", ONNX Runtime finds the ranges of activations in each run.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines.onnxruntime import sdk
from edgert.errors import BuildFailed
from edgert.printable import in_short
from edgert_deploy.packager.builders.layers import Layer, length_nodes
from edgert_deploy.packager.processes.vendor_output import quiet, working_in
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.branches import control_flow
from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of, nodes_of, refill
from edgert_deploy.packager.sources.onnx_graph.opsets import OPSET_MIN
from edgert_deploy.packager.sources.onnx_graph.structure import OF_DATA_LENGTHS, opset_of, sort_nodes
from edgert_deploy.packager.sources.source_model import HEAD, SourceModel

LIBRARIES = ("numpy", "onnx", "onnxruntime", "sympy")
FLOATS = (1, 10)  # FP32 and FP16, as onnx.TensorProto numbers them
CALIBRATION_SAMPLES_MAX = 300
OWN_ELEMENTS_MAX = 1024  # if a constant of FP32 has at most this many elements, each node gets a copy of it
INT8_NODES = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
FP16_CASTS = ("graph_input_cast", "graph_output_cast")  # the names of the FP16 converter's casts
PERCENTILE = 99.99  # the share of an activation's values that its range covers, in %
ATTENTION_OPS = ("Attention", "LayerNormalization", "MultiHeadAttention", "SkipLayerNormalization")
# Operators that may be between the softmax of an attention head and its product with the values.
PASS_THROUGH_OPS = ("Cast", "Dropout", "Identity", "Reshape", "Transpose")


@dataclass(frozen=True)
class Recipe:
    """The settings of a quantization. Weights are always in int8.

    Attributes:
        activations: The type of quantized activations, "uint8" or "int8".
        ops: The operators to quantize; None for all.
        options: Further options of ONNX Runtime's quantizer.
        ranges: The rule for the range of an activation over the samples: "MinMax", "Percentile" or "Entropy". With
            DYNAMIC_RANGE, the engine computes the range in each run.
    """

    activations: str
    ops: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ranges: str = "MinMax"


DYNAMIC_RANGE = "dynamic-range"
# The operators with most of the work. If only these are in INT8, additions and activations stay in float. So the
# coordinates and the scores of a detector's head do not share one scale.
HEAVY_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
HEAVY_RECIPES = ("heavy-only", DYNAMIC_RANGE)  # the recipes, of any engine, that quantize only these operators
# Operators that are faster with DYNAMIC_RANGE. Convolutions are not: ConvInteger is slower than Conv in float.
DYNAMIC_OPS = ("Gemm", "MatMul")

RECIPES = ("min-max", "heavy-only", "percentile", "entropy")


def recipes(proto: Any) -> tuple[str, ...]:
    """Return the recipes of RECIPES that the build tries for a model, in order.

    Only `--recipe` chooses the narrower ranges ("percentile", "entropy"), because they take longest and were better for
    no model of the zoo.
    """
    return ("min-max",) if is_transformer(proto) else ("min-max", "heavy-only")


def recipe_variant(recipe: Recipe, name: str) -> Recipe:
    """Return `recipe` changed to the recipe `name`, one of RECIPES or DYNAMIC_RANGE."""
    if name == DYNAMIC_RANGE:
        return replace(recipe, ops=DYNAMIC_OPS, ranges=name)
    if name == "heavy-only":
        return replace(recipe, ops=HEAVY_OPS)
    return replace(recipe, ranges={"percentile": "Percentile", "entropy": "Entropy"}.get(name, "MinMax"))


def quantize(
    source: SourceModel, calibration: CalibrationSet, recipe: Recipe, float_layers: Sequence[Layer] = ()
) -> Any:
    """Return the source as an INT8 Q/DQ ModelProto, with `float_layers` in float. Raises BuildFailed."""
    proto = prepared(source)
    if (opset := opset_of(source.proto)) < OPSET_MIN:
        raise BuildFailed(
            f"{source.path.name} has opset {opset}, and ONNX's converter does not raise it without other answers; INT8 needs "
            f"opset {OPSET_MIN}: export the model with opset 17, or build it with --precision auto"
        )
    excluded = [name for layer in float_layers for name in layer.nodes]
    excluded += [node.name for node in proto.graph.node if node.name.startswith(HEAD)]
    excluded += [*_without_ranges(proto), *sorted(length_nodes(proto))]
    excluded += _separate_weights(proto, recipe.ops or HEAVY_OPS, excluded)
    advice = "build this target with --precision fp32, or export the model with opset 17"
    failure = f"onnxruntime's quantizer failed on {source.path.name}"
    with tempfile.TemporaryDirectory(prefix="edgert-qdq-") as folder, vendor_tool(failure, advice):
        proto = _quantized(proto, calibration, recipe, excluded, Path(folder))
    if not INT8_NODES & {node.op_type for node in proto.graph.node}:
        if inside := control_flow(proto):
            raise BuildFailed(only_in_float(source, inside, "onnxruntime's quantizer leaves its inner nodes in float"))
        if recipe.ranges == DYNAMIC_RANGE:
            raise BuildFailed(
                f"{DYNAMIC_RANGE} quantizes only {' and '.join(DYNAMIC_OPS)} with constant weights, and "
                f"{source.path.name} has none: use another --recipe, or build the model with --precision auto"
            )
    # Inferred shapes only cost bytes on every device.
    del proto.graph.value_info[:]
    return proto


def prepared(source: SourceModel) -> Any:
    """Return the source as the quantizer needs it: folded, with shapes and node names. Raises BuildFailed."""
    failure = f"onnxruntime's tools cannot prepare {source.path.name}"
    with tempfile.TemporaryDirectory(prefix="edgert-qdq-") as folder, vendor_tool(failure, "export it with opset 17"):
        return _prepared(source, Path(folder))


@contextmanager
def vendor_tool(failure: str, advice: str) -> Iterator[None]:
    """Silence a vendor's tool and turn its errors into BuildFailed."""
    try:
        with quiet():
            yield
    except BuildFailed:
        raise
    except Exception as error:
        raise BuildFailed(f"{failure}: {in_short(error)}; {advice}") from error


def only_in_float(source: SourceModel, nodes: Sequence[str], why: str) -> str:
    """Return the message about a model whose If, Loop or Scan `nodes` prevent INT8."""
    return (
        f"{source.path.name} cannot be quantized: {', '.join(nodes[:3])} depends on the data, and {why}. "
        "Build the model with --precision auto, which chooses FP16 or FP32, or export the model without this node"
    )


def is_transformer(proto: Any) -> bool:
    """Whether the graph has attention. INT8 is inaccurate there, and some engines do not quantize it."""
    nodes = proto.graph.node
    if any(node.op_type in ATTENTION_OPS for node in nodes):
        return True
    readers: dict[str, list[Any]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return any(_reaches_matmul(node, readers) for node in nodes if node.op_type == "Softmax")


def calibration_feeds(calibration: CalibrationSet) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the inputs of the first CALIBRATION_SAMPLES_MAX samples, one at a time."""
    for i in range(min(len(calibration), CALIBRATION_SAMPLES_MAX)):
        yield calibration.served(i)


def at_least_opset(proto: Any, opset: int) -> Any:
    """Return the model in `opset` or a later opset. Raises BuildFailed."""
    from onnx import version_converter

    if opset_of(proto) >= opset:
        return proto
    with vendor_tool(f"the model cannot be converted to opset {opset}", "export it with that opset"):
        return version_converter.convert_version(proto, opset)


def to_fp16(proto: Any, source: SourceModel) -> Any:
    """Return the model in FP16. Operators without FP16 stay in FP32. Inputs and outputs do not change.

    Raises BuildFailed.
    """
    import onnx
    from onnx import shape_inference

    sdk()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with vendor_tool(f"{source.path.name} cannot be converted to FP16", "build this target with --precision fp32"):
        single = copy_of(proto)
        _rename_casts(single.graph)
        half = convert_float_to_float16(shape_inference.infer_shapes(single), keep_io_types=True)
        sort_nodes(half)  # the converter puts the inputs' casts last
        onnx.checker.check_model(half)
    del half.graph.value_info[:]
    return half


def _rename_casts(graph: Any) -> None:
    """Rename values and nodes with the names that the FP16 converter gives to its own casts.

    The model has such names if the same converter has made it, as in Ultralytics' export with `half=True`.
    """
    kept = {value.name for value in (*graph.input, *graph.output)}
    for node in nodes_of(graph):
        for names in (node.input, node.output):
            names[:] = [f"given_{name}" if name.startswith(FP16_CASTS) and name not in kept else name for name in names]
        if node.name.startswith(FP16_CASTS):
            node.name = f"given_{node.name}"
    refill(graph.value_info, [value for value in graph.value_info if not value.name.startswith(FP16_CASTS)])


def write_proto(proto: Any, path: Path) -> None:
    path.write_bytes(proto.SerializeToString(deterministic=True))


def tool_versions() -> dict[str, str]:
    import onnx

    return {"numpy": np.__version__, "onnx": onnx.__version__, "onnxruntime": sdk().__version__}


def _prepared(source: SourceModel, folder: Path) -> Any:
    import onnx

    sdk()  # before the next import, because `sdk` turns the telemetry of ONNX Runtime off
    from onnxruntime.quantization.shape_inference import quant_pre_process

    write_proto(source.proto, folder / "source.onnx")
    # The symbolic shape inference simplifies formulas of lengths. If the data determine many lengths, as in Faster
    # R-CNN, it does not end within minutes.
    unbounded = any(node.op_type in OF_DATA_LENGTHS for node in nodes_of(source.proto.graph))
    try:
        with working_in(folder):  # a failed preparation writes the model to the working folder
            quant_pre_process(folder / "source.onnx", folder / "prepared.onnx", skip_symbolic_shape=unbounded)
    except Exception:  # noqa: BLE001 - the symbolic shape inference fails on many trained models, and is optional
        quant_pre_process(folder / "source.onnx", folder / "prepared.onnx", skip_symbolic_shape=True)
    proto = onnx.load(folder / "prepared.onnx")
    _rename_constants(proto, source.proto)
    taken = {node.name for node in proto.graph.node if node.name}
    for node in proto.graph.node:
        if not node.name:
            node.name = next(n for n in (node.output[0], f"{node.op_type}_{node.output[0]}") if n not in taken)
            taken.add(node.name)
    _complete_types(proto)
    _flatten_biases(proto)
    _separate_constants(proto)
    return proto


def _rename_constants(proto: Any, given: Any) -> None:
    """Rename the constants that the preparation added to the `given` model.

    ONNX Runtime made their names, such as `gemm_input_shape`. If it optimizes the artifact, it uses these names again,
    and fails if they are taken.
    """
    known = {tensor.name for tensor in given.graph.initializer}
    known |= {name for node in given.graph.node for name in node.output}
    names = {t.name: f"prepared_{t.name}" for t in proto.graph.initializer if t.name not in known}
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in nodes_of(proto.graph):
        node.input[:] = [names.get(name, name) for name in node.input]


def _complete_types(proto: Any) -> None:
    """Declare FP32 values whose type was not inferred, such as those after operators of other domains."""
    import onnx

    known = {value.name for value in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output)}
    missing = [name for node in proto.graph.node for name in node.output if name and name not in known]
    if not missing:
        return
    shown = copy_of(proto)
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in missing)
    options = sdk().SessionOptions()
    options.log_severity_level = 4
    try:
        session = sdk().InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - the runtime's exceptions share no base class; the missing values then stay in float
        return
    types = {value.name: value.type for value in session.get_outputs()}
    proto.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in missing
        if types.get(name) == "tensor(float)"
    )


def _without_ranges(proto: Any) -> list[str]:
    """Return the Softmax nodes whose results are not known to be float. The quantizer would fail on them."""
    values = {value.name: value.type.tensor_type.elem_type for value in (*proto.graph.value_info, *proto.graph.output)}
    return [n.name for n in proto.graph.node if n.op_type == "Softmax" and values.get(n.output[0]) not in FLOATS]


def _flatten_biases(proto: Any) -> None:
    """Reshape a Gemm's bias from `[1, C]` to `[C]`: ONNX Runtime's quantizer fails on `[1, C]`."""
    biases = {node.input[2] for node in proto.graph.node if node.op_type == "Gemm" and len(node.input) > 2}
    others = {name for node in proto.graph.node for name in node.input[: 2 if node.op_type == "Gemm" else None]}
    for tensor in proto.graph.initializer:
        if tensor.name in biases - others and len(tensor.dims) == 2 and tensor.dims[0] == 1:
            del tensor.dims[0]


def _separate_constants(proto: Any) -> None:
    """Give each layer a bias of its own, and each node its own small constants.

    The quantizer may give a copy of a bias the name of another value. ONNX Runtime fails if it must convert a quantized
    constant for more than one node, as for exact products; its preparation joins equal constants.
    """
    import onnx

    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    small = {
        t.name
        for t in tensors.values()
        if t.data_type == onnx.TensorProto.FLOAT and math.prod(t.dims) <= OWN_ELEMENTS_MAX
    }
    reads = [
        (node, index)
        for node in proto.graph.node
        for index, name in enumerate(node.input)
        if name in small or (node.op_type in HEAVY_OPS and index == 2 and name in tensors)
    ]
    _copy_constants(proto, _repeated(reads))


def _separate_weights(proto: Any, ops: Collection[str], excluded: Collection[str]) -> list[str]:
    """Give each quantized layer its own weights. Return the names of layers that must stay in float.

    For exact products, ONNX Runtime converts the weights of each layer, and fails if another layer reads them, too.
    Examples are a detector's head for several sizes, and the steps of an unrolled LSTM. If the copies are larger than
    all constants of the model, the layers with shared weights stay in float: in INT8, the file could become larger
    than in FP32.
    """
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    layers = [node for node in proto.graph.node if node.op_type in HEAVY_OPS and node.op_type in ops]
    layers = [node for node in layers if node.name not in excluded]
    reads = [(node, i) for node in layers for i, name in enumerate(node.input[:2]) if name in tensors]
    again = _repeated(reads)
    copied = sum(math.prod(tensors[node.input[i]].dims) for node, i in again)
    if copied > sum(math.prod(tensor.dims) for tensor in tensors.values()):
        shared = {node.input[i] for node, i in again}
        return [node.name for node, i in reads if node.input[i] in shared]
    _copy_constants(proto, again)
    return []


def _repeated(reads: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Return the reads (node, index of the input) of constants that an earlier read has, too."""
    seen: set[str] = set()
    again = []
    for node, index in reads:
        if node.input[index] in seen:
            again.append((node, index))
        seen.add(node.input[index])
    return again


def _copy_constants(proto: Any, reads: Sequence[tuple[Any, int]]) -> None:
    """Give each of these reads (node, index of the input) its own copy of the constant."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    taken = {*tensors, *(name for node in proto.graph.node for name in (*node.input, *node.output))}
    for node, index in reads:
        copy = proto.graph.initializer.add()
        copy.CopyFrom(tensors[node.input[index]])
        copy.name = next(n for i in itertools.count(2) if (n := f"{node.input[index]}_{i}") not in taken)
        taken.add(copy.name)
        node.input[index] = copy.name


def _quantized(proto: Any, calibration: CalibrationSet, recipe: Recipe, excluded: list[str], folder: Path) -> Any:
    import onnx
    from onnxruntime import quantization

    write_proto(proto, folder / "prepared.onnx")

    types = {"uint8": quantization.QuantType.QUInt8, "int8": quantization.QuantType.QInt8}
    files = (folder / "prepared.onnx", folder / "int8.onnx")
    common: dict[str, Any] = {
        "op_types_to_quantize": None if recipe.ops is None else list(recipe.ops),
        "per_channel": True,
        "weight_type": types["int8"],
        "nodes_to_exclude": excluded,
    }
    if recipe.ranges == DYNAMIC_RANGE:
        quantization.quantize_dynamic(*files, **common)
    else:
        if recipe.ranges != "MinMax" and calibration.buckets is not None:
            # Histograms need activations of one shape, so every sample gets the shape of the largest bucket.
            calibration = replace(calibration, buckets=None, lengths=None)
        quantization.quantize_static(
            *files,
            calibration_reader(calibration_feeds(calibration)),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=types[recipe.activations],
            calibrate_method=quantization.CalibrationMethod[recipe.ranges],
            extra_options={**recipe.options, "CalibPercentile": PERCENTILE},
            **common,
        )
    return onnx.load(folder / "int8.onnx")


def calibration_reader(feeds: Iterator[dict[str, NDArray[Any]]]) -> Any:
    """Return an object with the method of ONNX Runtime's CalibrationDataReader.

    A subclass of CalibrationDataReader would need an import at module level.
    """
    return SimpleNamespace(get_next=lambda: next(feeds, None))


def _reaches_matmul(softmax: Any, readers: dict[str, list[Any]]) -> bool:
    names = list(softmax.output)
    while names:
        for node in readers.get(names.pop(), []):
            if node.op_type == "MatMul":
                return True
            if node.op_type in PASS_THROUGH_OPS:
                names.extend(node.output)
    return False
