"""Models with Q/DQ (QuantizeLinear and DequantizeLinear), from quantized training or from exporters.

The build keeps the scales of these models: ONNX Runtime, OpenVINO and TensorRT get such a graph unchanged, and TFLite's
quantizer gets the ranges of the graph. For FP32, `float_of` removes the quantization of activations. Weights keep their
rounded values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from edgert.errors import BuildFailed
from edgert_deploy.packager.sources.onnx_graph.nodes import Array, Constants, attribute_of, copy_of, nodes_of, refill
from edgert_deploy.packager.sources.onnx_graph.quantization.dynamic_quantization import (
    RANGES_AS_THEY_RUN,
    undo_dynamic_quantization,
)
from edgert_deploy.packager.sources.onnx_graph.quantization.quantized_operators import DEQUANTIZE, QUANTIZE, as_qdq

# Operators of quantized arithmetic. `float_of` keeps them unless dynamic_quantization.py replaces them.
QUANTIZED_ARITHMETIC = RANGES_AS_THEY_RUN.union(
    ("ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "QLinearConv", "QLinearMatMul")
)
INTEGERS = {"uint8": (0, 255), "int8": (-128, 127), "int16": (-32768, 32767), "uint16": (0, 65535)}
INTEGERS |= {"uint4": (0, 15), "int4": (-8, 7)}
# Operators whose results are never negative, and operators that keep the sign of their input.
POSITIVE = frozenset({"Relu", "Sigmoid", "Softmax"})
KEEP_SIGN = frozenset(
    {"AveragePool", "Flatten", "GlobalAveragePool", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
POSITIVE_SUFFIX = "/edgert_positive"


def is_quantized(proto: Any) -> bool:
    """Whether activations are quantized. A model of which only the weights are in INT8 counts as float."""
    constants = Constants(proto)
    return any(
        node.op_type in QUANTIZED_ARITHMETIC or (node.op_type == QUANTIZE and node.input[0] not in constants)
        for node in proto.graph.node
    )


def has_wide_activations(proto: Any) -> bool:
    """Whether an activation is quantized to 16 bits."""
    constants = Constants(proto)
    quantizers = (n for n in proto.graph.node if n.op_type == QUANTIZE and n.input[0] not in constants)
    zeros = (constants.get(node.input[2]) for node in quantizers if len(node.input) > 2)
    return any(zero is not None and zero.dtype.itemsize > 1 for zero in zeros)


def float_of(proto: Any) -> Any:
    """Return the model with float weights and without Q/DQ. Raises BuildFailed if this is impossible."""
    proto = as_qdq(proto)
    copy = copy_of(proto)
    undo_dynamic_quantization(copy, Constants(proto))
    nodes = list(copy.graph.node)
    if foreign := sorted({node.op_type for node in nodes} & QUANTIZED_ARITHMETIC):
        raise BuildFailed(
            f"the model holds {', '.join(foreign)}, which EdgeRT cannot convert to float. Export the model in the Q/DQ format, or in float"
        )
    constants = Constants(proto)
    del copy.graph.node[:]
    unpacked: dict[str, Array] = {}  # the results of Q and DQ nodes that read constants
    before: dict[str, str] = {}  # a value after Q/DQ -> the value before it
    unrounded: set[str] = set()  # results of nodes after a removed Q: floats, even if they were integers before
    outputs = {value.name for value in proto.graph.output}
    # The values that need no Relu: they are never negative, or they are inputs of the model.
    positive = {value.name for value in proto.graph.input}
    for node in nodes:
        name = node.output[0] if node.output else ""
        if node.op_type not in (QUANTIZE, DEQUANTIZE):
            copied = copy.graph.node.add()
            copied.CopyFrom(node)
            if node.input and (node.input[0] in before or node.input[0] in unrounded):
                unrounded.update(node.output)
            for i, read in enumerate(copied.input):
                copied.input[i] = before.get(read, read)
            if node.op_type in POSITIVE or (node.op_type in KEEP_SIGN and copied.input[0] in positive):
                positive.update(node.output)
            continue
        source = unpacked.get(node.input[0], constants.get(node.input[0]))
        if source is not None:
            unpacked[name] = (
                _quantized(node, source, constants) if node.op_type == QUANTIZE else _float(node, source, constants)
            )
        elif node.op_type == DEQUANTIZE and node.input[0] not in before and node.input[0] not in unrounded:
            # These integers do not come from a Q. They are rows that Gather reads from a table, or an input.
            copy.graph.node.extend(_as_float(node, constants, unpacked))
        else:
            before[name] = before.get(node.input[0], node.input[0])
            if node.op_type == QUANTIZE and before[name] not in positive and _range(node, constants)[0] == 0:
                before[name] = _made_positive(copy.graph, before[name], positive)
            if name in outputs:
                copy.graph.node.add(op_type="Identity", input=[before[name]], output=[name])
    _put_constants(copy.graph, unpacked)
    del copy.graph.value_info[:]
    return copy


def ranges_of(proto: Any) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest value of each activation that a Q reads, keyed by its name."""
    constants = Constants(proto)
    ranges = {}
    for node in proto.graph.node:
        if node.op_type != QUANTIZE or node.input[0] in constants:
            continue
        if len(limits := _range(node, constants)) == 2:
            ranges[node.input[0]] = ranges[node.input[0] + POSITIVE_SUFFIX] = (limits[0], limits[1])
    return ranges


def _range(node: Any, constants: Constants) -> tuple[float, ...]:
    """Return the lowest and the highest value that a Q can express; (NaN,) for scales per channel."""
    scale, zero_point = _scale(node, constants), _zero_point(node, constants)
    if (scale.size, zero_point.size) != (1, 1):
        return (float("nan"),)
    return tuple(float(scale.flat[0]) * (limit - int(zero_point.flat[0])) for limit in INTEGERS[zero_point.dtype.name])


def _made_positive(graph: Any, value: str, positive: set[str]) -> str:
    """Add a Relu after `value`, unless it has one already; return the name of the Relu's result.

    ONNX Runtime's quantizer removes a Relu before a range that begins at 0, but the float graph needs the Relu.
    """
    name = value + POSITIVE_SUFFIX
    if name not in positive:
        graph.node.add(op_type="Relu", name=name, input=[value], output=[name])
        positive.add(name)
    return name


def _scale(node: Any, constants: Constants) -> Array:
    scale = constants.get(node.input[1])
    if scale is None:
        raise BuildFailed(
            f"the scale of {node.op_type} node {(node.name or node.output[0])!r} is computed while the model runs; export the "
            "model with constant scales"
        )
    return scale.astype(np.float64)


def _zero_point(node: Any, constants: Constants) -> Array:
    zero_point = constants.get(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
    if zero_point is None or (zero_point.dtype.name not in INTEGERS and zero_point.dtype != np.int32):
        raise BuildFailed(
            f"the zero point of {node.op_type} node {(node.name or node.output[0])!r} is computed, or has a width other than 8 or 16 bits; "
            "export the model in INT8"
        )
    return zero_point


def _along(node: Any, values: Array, shape: tuple[int, ...]) -> Array:
    """Reshape or repeat `values` (per tensor, channel or block) so that they broadcast over `shape`."""
    if values.size == 1:
        return values.reshape(())
    axis = attribute_of(node, "axis", 1) % len(shape)
    if block := attribute_of(node, "block_size", 0):
        return np.repeat(values, block, axis).take(range(shape[axis]), axis)
    return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def _quantized(node: Any, array: Array, constants: Constants) -> Array:
    scale, zero_point = _scale(node, constants), _zero_point(node, constants)
    low, high = INTEGERS[zero_point.dtype.name]
    steps = np.rint(array / _along(node, scale, array.shape)) + _along(node, zero_point, array.shape)
    return steps.clip(low, high).astype(zero_point.dtype)


def _float(node: Any, array: Array, constants: Constants) -> Array:
    scale = _scale(node, constants)
    zero_point = _zero_point(node, constants) if len(node.input) > 2 and node.input[2] else np.zeros((), array.dtype)
    exact = (array.astype(np.float64) - _along(node, zero_point, array.shape)) * _along(node, scale, array.shape)
    return np.asarray(exact, np.float32)


def _as_float(node: Any, constants: Constants, unpacked: dict[str, Array]) -> Iterator[Any]:
    """Yield float nodes that compute the result of a DequantizeLinear with one scale."""
    from onnx import helper

    name = str(node.output[0])
    scale = _scale(node, constants)
    zero_point = _zero_point(node, constants) if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
    if scale.size > 1:
        raise BuildFailed(
            f"{DEQUANTIZE} node {(node.name or name)!r} has a scale for each channel, but its input is not a constant; export "
            "the model with a scale for each tensor, or in float"
        )
    unpacked[f"{name}/zero"] = zero_point.reshape(()).astype(np.float32)
    unpacked[f"{name}/scale"] = scale.reshape(()).astype(np.float32)
    yield helper.make_node("Cast", [node.input[0]], [f"{name}/cast"], to=helper.TensorProto.FLOAT)
    yield helper.make_node("Sub", [f"{name}/cast", f"{name}/zero"], [f"{name}/moved"])
    yield helper.make_node("Mul", [f"{name}/moved", f"{name}/scale"], [name])


def _put_constants(graph: Any, unpacked: dict[str, Array]) -> None:
    """Add `unpacked` to the initializers, and drop initializers that no node reads."""
    from onnx import numpy_helper

    used = {name for node in nodes_of(graph) for name in node.input} | {value.name for value in graph.output}
    refill(graph.initializer, (tensor for tensor in graph.initializer if tensor.name in used))
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in unpacked.items() if name in used)
