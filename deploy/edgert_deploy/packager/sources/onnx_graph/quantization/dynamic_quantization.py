"""Models that quantize activations at run time, as ONNX Runtime's `quantize_dynamic` writes them.

ONNX Runtime runs such a graph unchanged. Other engines lack its operators, so this module writes the same arithmetic in
float. This is possible because the weights are constants in INT8. In ONNX Runtime, all items of a batch share a range,
but an answer must not depend on other items. So `examine` fixes the batch of such a model to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgert.errors import BuildFailed
from edgert_deploy.packager.sources.onnx_graph.nodes import Array

QUANTIZE = "DynamicQuantizeLinear"
# Operators that compute the range of their input at run time. The first is from ONNX, the others from ONNX Runtime.
RANGES_AS_THEY_RUN = frozenset({QUANTIZE, "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"})
FLOAT_SUFFIX = "/edgert_float"


def is_dynamic(proto: Any) -> bool:
    """Whether the model computes the range of an activation from a whole batch."""
    return any(node.op_type in RANGES_AS_THEY_RUN for node in proto.graph.node)


def undo_dynamic_quantization(proto: Any, constants: Any) -> None:
    """Replace the quantized operators of `proto` by float operators, in place. Raises BuildFailed."""
    if not is_dynamic(proto):
        return
    graph = _Graph(proto.graph, constants)
    nodes = list(proto.graph.node)
    sums = {node.output[0] for node in nodes if node.op_type in ("ConvInteger", "MatMulInteger")}
    del proto.graph.node[:]
    for node in nodes:
        if graph.fold(node):
            continue
        has_float_bias = node.op_type == "Add" and any(name in graph.made for name in node.input)
        if node.op_type != "Cast" and not has_float_bias and sums.intersection(node.input):
            raise BuildFailed(
                f"{node.op_type} {(node.name or node.output[0])!r} computes with sums in INT32, so EdgeRT cannot convert the model "
                "to float. Give the float model from which it was quantized, or build for onnxruntime"
            )
        proto.graph.node.extend(_REPLACED[node.op_type](graph, node) if node.op_type in _REPLACED else [node])
    del proto.graph.value_info[:]  # the types of some values changed


class _Graph:
    """The values of the graph: constants, and the float value of each quantized activation."""

    def __init__(self, graph: Any, constants: Any) -> None:
        self._graph = graph
        self._constants = constants
        self.made: dict[str, Array] = {}
        self.before: dict[str, str] = {}

    def put(self, name: str, array: Array) -> str:
        from onnx import numpy_helper

        self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        self.made[name] = array
        return name

    def fold(self, node: Any) -> bool:
        """If `node` computes with scales, make the result a constant and return True.

        ONNX Runtime 1.32 crashes on a product of scales in FP16. Quantizers of 2020 divide a bias by the scale of the
        sums, and round it to add it in INT32. The constant is not rounded.
        """
        if node.op_type not in _FOLDED or not any(name in self.made for name in node.input):
            return False
        values = [self.made.get(name, self._constants.get(name)) for name in node.input]
        if any(value is None for value in values):
            return False
        self.put(node.output[0], np.asarray(_FOLDED[node.op_type](*values), np.float32))
        return True

    def read(self, node: Any, at: int) -> Array:
        """Return the constant at input `at` of `node`. Raises BuildFailed if the model computes this input."""
        array = self._constants.get(node.input[at])
        if array is None:
            raise BuildFailed(
                f"the INT8 weights of {node.op_type} {(node.name or node.output[0])!r} are computed while the model runs, "
                "so EdgeRT cannot convert the model to float. Give the float model from which it was quantized"
            )
        return np.asarray(array)

    def operand(self, node: Any, at: int, zero_at: int, shape: tuple[int, ...] = ()) -> str:
        """Return the name of input `at` in float, minus its zero point.

        `zero_at` is the position of the zero point among the inputs. A zero point per channel gets `shape`.
        """
        name = str(node.input[at])
        if name in self.before:
            return self.before[name]
        has_zero = len(node.input) > zero_at and node.input[zero_at]
        zero = self.read(node, zero_at) if has_zero else np.zeros((), np.int32)
        zero = zero.reshape(shape) if shape and zero.size > 1 else zero
        return self.put(
            f"{node.output[0]}{FLOAT_SUFFIX}{at}", self.read(node, at).astype(np.float32) - zero.astype(np.float32)
        )


def _quantize(graph: _Graph, node: Any) -> list[Any]:
    """Leave out a DynamicQuantizeLinear: its readers read the float value, with a scale of 1."""
    graph.before[node.output[0]] = node.input[0]
    graph.put(node.output[1], np.ones((), np.float32))
    return []


def _matmul(graph: _Graph, node: Any) -> list[Any]:
    from onnx import helper

    return [helper.make_node("MatMul", [graph.operand(node, 0, 2), graph.operand(node, 1, 3)], node.output[:1])]


def _conv(graph: _Graph, node: Any) -> list[Any]:
    from onnx import helper

    weights = graph.operand(node, 1, 3, (-1, *(1 for _ in graph.read(node, 1).shape[1:])))
    conv = helper.make_node("Conv", [graph.operand(node, 0, 2), weights], node.output[:1])
    conv.attribute.extend(node.attribute)
    return [conv]


def _lstm(graph: _Graph, node: Any) -> list[Any]:
    """Replace a DynamicQuantizeLSTM by an LSTM.

    In a DynamicQuantizeLSTM, W and R are transposed, and inputs 8 to 11 are their scales and zero points.
    """
    from onnx import helper

    inputs = list(node.input)[:8]
    for at, scale_at in ((1, 8), (2, 10)):
        array = graph.read(node, at).astype(np.float32)
        scale, zero = (
            graph.read(node, i).astype(np.float32).reshape(len(array), 1, -1) for i in (scale_at, scale_at + 1)
        )
        inputs[at] = graph.put(f"{node.output[0]}{FLOAT_SUFFIX}{at}", ((array - zero) * scale).transpose(0, 2, 1))
    while not inputs[-1]:
        inputs.pop()
    lstm = helper.make_node("LSTM", inputs, node.output)
    lstm.attribute.extend(node.attribute)
    return [lstm]


_REPLACED = {QUANTIZE: _quantize, "MatMulInteger": _matmul, "ConvInteger": _conv, "DynamicQuantizeLSTM": _lstm}
_FOLDED: dict[str, Callable[..., Array]] = {
    "Mul": np.multiply,
    "Div": np.divide,
    "Floor": lambda bias: bias,
    "Cast": lambda bias: bias,
    "Reshape": lambda bias, shape: bias.reshape(shape),
}
