"""Rewrites operators on quantized integers, such as QLinearConv, as float operators between Q/DQ.

ONNX Runtime's tools call the format before this rewriting QOperator, and the format after it QDQ. The INT8 models of
the ONNX model zoo are in QOperator, which only ONNX Runtime supports completely. The rewriting keeps the scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.nodes import Constants, attribute_of, copy_of, refill

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


@dataclass(frozen=True)
class _Form:
    """The positions of a quantized operator's inputs.

    Attributes:
        op: The float operator that computes the same function.
        operands: The position of each operand. The scale and the zero point of the operand are the next two inputs.
        result: The position of the result's scale. The zero point of the result is the next input.
        bias: The position of the bias in INT32; -1 if there is none. The scale of the bias is the product of both
            operands' scales.
    """

    op: str
    operands: tuple[int, ...]
    result: int
    bias: int = -1


_ONE, _TWO = ((0,), 3), ((0, 3), 6)
_FORMS = {
    "QLinearConv": _Form("Conv", *_TWO, bias=8),
    "QLinearMatMul": _Form("MatMul", *_TWO),
    "QGemm": _Form("Gemm", (0, 3), 7, bias=6),
    "QLinearAdd": _Form("Add", *_TWO),
    "QLinearMul": _Form("Mul", *_TWO),
    "QLinearSigmoid": _Form("Sigmoid", *_ONE),
    "QLinearLeakyRelu": _Form("LeakyRelu", *_ONE),
    "QLinearSoftmax": _Form("Softmax", *_ONE),
    "QLinearAveragePool": _Form("AveragePool", *_ONE),
    "QLinearGlobalAveragePool": _Form("GlobalAveragePool", *_ONE),
}
# The inputs of CONCAT are the scale and the zero point of the result. Then the value, the scale and the zero point of
# each operand follow.
CONCAT = "QLinearConcat"
OPSET_OF_AXIS = 13  # the first opset in which a Softmax runs over one axis
OWN_ATTRIBUTES = ("channels_last", "opset")  # attributes that only ONNX Runtime's operators have


def as_qdq(proto: Any) -> Any:
    """Return the model with float operators between Q/DQ. Unknown operators stay as they are."""
    if not any(node.op_type in _FORMS or node.op_type == CONCAT for node in proto.graph.node):
        return proto
    copy = copy_of(proto)
    rewriter = _Rewriter(copy)
    refill(copy.graph.node, (new for node in proto.graph.node for new in rewriter.nodes(node)))
    del copy.graph.value_info[:]
    return copy


class _Rewriter:
    """Yields the new nodes and writes the scales of biases into the graph."""

    def __init__(self, proto: Any) -> None:
        self._graph = proto.graph
        self._constants = Constants(proto)

    def nodes(self, node: Any) -> Iterator[Any]:
        """Yield `node` itself, or the nodes that replace it."""
        from onnx import helper

        form = _FORMS.get(node.op_type)
        if node.op_type == CONCAT:
            form = _Form("Concat", tuple(range(2, len(node.input), 3)), 0)
        if form is None or not self._is_known(node, form):
            yield node
            return
        name, inputs = str(node.output[0]), list[str]()
        for at in form.operands:
            inputs.append(f"{name}/float{at}")
            yield self._dequantized(node.input[at : at + 3], inputs[-1], 0 if _has_channels_first(node) else 1)
        if 0 < form.bias < len(node.input) and node.input[form.bias]:
            inputs.append(f"{name}/bias")
            scale = self._scale_of_sums(node)
            yield helper.make_node(DEQUANTIZE, [node.input[form.bias], scale], inputs[-1:], f"{name}/bias/dq", axis=0)
        result = [name for name in node.input[form.result : form.result + 2] if name]
        computed = f"{name}/float" if result else name  # without a scale of its result, a QGemm gives floats
        if node.op_type == "QLinearSoftmax" and attribute_of(node, "opset", OPSET_OF_AXIS) < OPSET_OF_AXIS:
            yield from _softmax_of_rows(name, inputs[0], computed, attribute_of(node, "axis", -1))
        else:
            plain = helper.make_node(form.op, inputs, [computed], node.name or name)
            plain.attribute.extend(a for a in node.attribute if a.name not in OWN_ATTRIBUTES)
            yield plain
        if result:
            yield helper.make_node(QUANTIZE, [computed, *result], [name], f"{name}/q")

    def _is_known(self, node: Any, form: _Form) -> bool:
        return not attribute_of(node, "channels_last", 0) and all(
            node.input[at + 1] in self._constants for at in form.operands
        )

    def _dequantized(self, inputs: Sequence[str], name: str, axis: int) -> Any:
        from onnx import helper

        scale = self._constants.get(inputs[1])
        own = {"axis": axis} if scale is not None and scale.size > 1 else {}
        return helper.make_node(DEQUANTIZE, [each for each in inputs if each], [name], f"{name}/dq", **own)

    def _scale_of_sums(self, node: Any) -> str:
        """Return the name of the bias's scale: the product of the operands' scales, times a QGemm's alpha."""
        from onnx import numpy_helper

        left, right = (np.asarray(self._constants.get(node.input[at])) for at in (1, 4))
        name = f"{node.output[0]}/scale"
        product = left.reshape(()) * right.reshape(() if right.size == 1 else -1) * attribute_of(node, "alpha", 1.0)
        self._graph.initializer.append(numpy_helper.from_array(product.astype(np.float32), name))
        return name


def _softmax_of_rows(name: str, values: str, result: str, axis: int) -> list[Any]:
    """Return the nodes of a Softmax before opset 13: it runs over `axis` and all later axes together."""
    from onnx import helper

    rows, shares, shape = f"{name}/rows", f"{name}/shares", f"{name}/shape"
    return [
        helper.make_node("Flatten", [values], [rows], rows, axis=axis),
        helper.make_node("Softmax", [rows], [shares], name, axis=-1),
        helper.make_node("Shape", [values], [shape], shape),
        helper.make_node("Reshape", [shares, shape], [result], result),
    ]


def _has_channels_first(node: Any) -> bool:
    """Whether scales per channel belong to axis 0 of the node's weights. Otherwise they belong to axis 1."""
    return node.op_type == "QLinearConv" or bool(attribute_of(node, "transB", 0))
