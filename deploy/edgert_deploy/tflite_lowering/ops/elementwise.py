"""Operators that work element by element: unary functions, activations, arithmetic with broadcasting, casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.tflite_lowering.fusion import RSQRT, clamp_name
from edgert_deploy.tflite_lowering.graph import Node
from edgert_deploy.tflite_lowering.lowering import FLOAT32, Layout, Lowering, Uncovered
from edgert_deploy.tflite_lowering.writer import TENSOR_TYPES

UNARY = {
    "Abs": "ABS",
    "Ceil": "CEIL",
    "Cos": "COS",
    "Exp": "EXP",
    "Floor": "FLOOR",
    "HardSwish": "HARD_SWISH",
    "Log": "LOG",
    "Not": "LOGICAL_NOT",
    "Relu": "RELU",
    "Round": "ROUND",
    RSQRT: "RSQRT",
    "Sigmoid": "LOGISTIC",
    "Sin": "SIN",
    "Sqrt": "SQRT",
    "Tanh": "TANH",
}
ARITHMETIC = {"Add": "ADD", "Sub": "SUB", "Mul": "MUL"}
# Binary operators without a fused activation.
BINARY = {
    "And": "LOGICAL_AND",
    "Equal": "EQUAL",
    "Greater": "GREATER",
    "GreaterOrEqual": "GREATER_EQUAL",
    "Less": "LESS",
    "LessOrEqual": "LESS_EQUAL",
    "Or": "LOGICAL_OR",
}
VARIADIC = {"Max": "MAXIMUM", "Min": "MINIMUM", "Sum": "ADD"}


class Steps:
    """Element-wise operators in a row over one value's shape and layout; the last one makes the node's result."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        self.lowering, self.node = lowering, node
        self.layout = lowering.layout(node.inputs[0])
        self.x = lowering.tensor(node.inputs[0], self.layout)
        self.shape = lowering.laid_out(lowering.shape(node.inputs[0]), self.layout)

    def constant(self, value: float) -> int:
        return self.lowering.constant(np.float32(value), f"{self.node.outputs[0]}_constant")

    def between(self, code: str, *inputs: int, activation: str = "NONE") -> int:
        return self._write(code, inputs, self.lowering.scratch(f"{self.node.outputs[0]}_step", self.shape), activation)

    def last(self, code: str, *inputs: int, activation: str = "NONE", **options: Any) -> None:
        output = self.lowering.define(self.node.outputs[0], self.layout)
        self._write(code, inputs, output, activation, **options)

    def _write(self, code: str, inputs: tuple[int, ...], output: int, activation: str, **options: Any) -> int:
        if code in ("ADD", "SUB", "MUL", "DIV"):
            return self.lowering.arithmetic(code, list(inputs), output, activation)
        self.lowering.emit(code, list(inputs), [output], **options)
        return output


# --- one input


def unary(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last(UNARY[node.op_type], steps.x)


def negative(lowering: Lowering, node: Node) -> None:
    """Times -1: the quantiser leaves NEG in float32."""
    steps = Steps(lowering, node)
    if lowering.dtype(node.inputs[0]) == FLOAT32:
        steps.last("MUL", steps.x, steps.constant(-1.0))
    else:
        steps.last("NEG", steps.x)


def identity(lowering: Lowering, node: Node) -> None:
    if any(node.outputs[1:]):
        raise Uncovered("only the first output is covered")
    layout = lowering.layout(node.inputs[0])
    lowering.alias(node.outputs[0], layout, lowering.tensor(node.inputs[0], layout))


def clip(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    name = clamp_name(node, lambda bound: float(lowering.value(bound, "a bound").reshape(())) if bound else None)
    is_float = lowering.dtype(node.inputs[0]) == FLOAT32
    if name != "NONE" and is_float:
        steps.last(name, steps.x)
        return
    bounds = [(code, _bound(lowering, node, attribute, index)) for index, (attribute, code) in CLIP_BOUNDS.items()]
    given = [(code, bound) for code, bound in bounds if bound is not None]
    if not given or not is_float:
        raise Uncovered("a Clip without bounds, or of integers, is not covered")
    x = steps.x
    for code, bound in given[:-1]:
        x = steps.between(code, x, steps.constant(bound))
    steps.last(given[-1][0], x, steps.constant(given[-1][1]))


CLIP_BOUNDS = {1: ("min", "MAXIMUM"), 2: ("max", "MINIMUM")}


def _bound(lowering: Lowering, node: Node, attribute: str, index: int) -> float | None:
    if attribute in node.attributes:
        return float(node.attributes[attribute])
    name = node.input(index)
    return float(lowering.value(name, f"the {attribute} of Clip").reshape(())) if name else None


def gelu(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("GELU", steps.x, approximate=node.attributes.get("approximate", "none") == "tanh")


def leaky_relu(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("LEAKY_RELU", steps.x, alpha=float(node.attributes.get("alpha", 0.01)))


def elu(lowering: Lowering, node: Node) -> None:
    if node.attributes.get("alpha", 1.0) != 1.0:
        raise Uncovered(f"alpha {node.attributes['alpha']}; only 1 is covered")
    steps = Steps(lowering, node)
    steps.last("ELU", steps.x)


def softplus(lowering: Lowering, node: Node) -> None:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    steps = Steps(lowering, node)
    decay = steps.between("EXP", steps.between("MUL", steps.between("ABS", steps.x), steps.constant(-1.0)))
    smooth = steps.between("LOG", steps.between("ADD", decay, steps.constant(1.0)))
    steps.last("ADD", steps.between("RELU", steps.x), smooth)


def hard_sigmoid(lowering: Lowering, node: Node) -> None:
    """relu6(6 * (alpha * x + beta)) / 6 = clip(alpha * x + beta, 0, 1)."""
    alpha, beta = (float(node.attributes.get(k, d)) for k, d in (("alpha", 0.2), ("beta", 0.5)))
    steps = Steps(lowering, node)
    scaled = steps.between("MUL", steps.x, steps.constant(6 * alpha))
    clamped = steps.between("ADD", scaled, steps.constant(6 * beta), activation="RELU6")
    steps.last("MUL", clamped, steps.constant(1 / 6))


def softsign(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("DIV", steps.x, steps.between("ADD", steps.between("ABS", steps.x), steps.constant(1.0)))


def reciprocal(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("DIV", steps.constant(1.0), steps.x)


def cast(lowering: Lowering, node: Node) -> None:
    types = [TENSOR_TYPES[lowering.dtype(name)] for name in (node.inputs[0], node.outputs[0])]
    steps = Steps(lowering, node)
    steps.last("CAST", steps.x, inDataType=types[0], outDataType=types[1])


# --- several inputs, with broadcasting


def arithmetic(lowering: Lowering, node: Node) -> None:
    inputs, layout = operands(lowering, node)
    output = lowering.define(node.outputs[0], layout)
    lowering.arithmetic(ARITHMETIC[node.op_type], inputs, output, node.activation)


def divide(lowering: Lowering, node: Node) -> None:
    """By a constant: multiply by its inverse, because DIV has no INT8 kernel."""
    divisor = lowering.graph.constants.get(node.inputs[1])
    layout = _operand_layout(lowering, node)
    if lowering.dtype(node.outputs[0]) != FLOAT32:
        raise Uncovered("division of integers is not covered")
    if divisor is None or (divisor == 0).any():
        inputs, _ = operands(lowering, node)
        lowering.arithmetic("DIV", inputs, lowering.define(node.outputs[0], layout))
        return
    inverse = (1 / lowering.value(node.inputs[1], "the divisor").astype(np.float64)).astype(np.float32)
    factor = broadcast_constant(lowering, inverse, f"{node.inputs[1]}_inverse", _rank(lowering, node), layout)
    source = _operand(lowering, node.inputs[0], _rank(lowering, node), layout)
    lowering.arithmetic("MUL", [source, factor], lowering.define(node.outputs[0], layout))


def power(lowering: Lowering, node: Node) -> None:
    exponent = lowering.graph.constants.get(node.inputs[1])
    steps = Steps(lowering, node)
    if exponent is not None and exponent.size == 1 and float(exponent.reshape(())) in KNOWN_POWERS:
        KNOWN_POWERS[float(exponent.reshape(()))](steps)
        return
    if lowering.dtype(node.inputs[1]) != FLOAT32 and exponent is None:
        raise Uncovered("a computed exponent of integers is not covered")
    if exponent is not None and exponent.size == 1:
        steps.last("POW", steps.x, steps.constant(float(exponent.reshape(()))))
        return
    inputs, layout = operands(lowering, node)
    lowering.emit("POW", inputs, [lowering.define(node.outputs[0], layout)])


KNOWN_POWERS: dict[float, Callable[[Steps], None]] = {
    0.5: lambda steps: steps.last("SQRT", steps.x),
    1.0: lambda steps: steps.last("MUL", steps.x, steps.constant(1.0)),
    2.0: lambda steps: steps.last("MUL", steps.x, steps.x),
    3.0: lambda steps: steps.last("MUL", steps.between("MUL", steps.x, steps.x), steps.x),
}


def prelu(lowering: Lowering, node: Node) -> None:
    layout = lowering.layout(node.inputs[0])
    slope = lowering.value(node.inputs[1], "the slope")
    rank = _rank(lowering, node)
    inputs = [
        lowering.tensor(node.inputs[0], layout),
        broadcast_constant(lowering, slope, node.inputs[1], rank, layout, drop_batch=True),
    ]
    lowering.emit("PRELU", inputs, [lowering.define(node.outputs[0], layout)])


def binary(lowering: Lowering, node: Node) -> None:
    inputs, layout = operands(lowering, node)
    lowering.emit(BINARY[node.op_type], inputs, [lowering.define(node.outputs[0], layout)])


def variadic(lowering: Lowering, node: Node) -> None:
    """Max, Min or Sum of any number of operands: two at a time."""
    inputs, layout = operands(lowering, node)
    if len(inputs) == 1:
        identity(lowering, node)
        return
    shape = lowering.laid_out(lowering.shape(node.outputs[0]), layout)
    if len(inputs) > 2 and any(lowering.shape(n).dims != lowering.shape(node.outputs[0]).dims for n in node.inputs):
        raise Uncovered("more than two operands that broadcast are not covered")
    held = inputs[0]
    for operand in inputs[1:-1]:
        held, before = lowering.scratch(f"{node.outputs[0]}_step", shape, lowering.dtype(node.outputs[0])), held
        lowering.emit(VARIADIC[node.op_type], [before, operand], [held])
    lowering.emit(VARIADIC[node.op_type], [held, inputs[-1]], [lowering.define(node.outputs[0], layout)])


def where(lowering: Lowering, node: Node) -> None:
    inputs, layout = operands(lowering, node)
    lowering.emit("SELECT_V2", inputs, [lowering.define(node.outputs[0], layout)])


def operands(lowering: Lowering, node: Node) -> tuple[list[int], Layout]:
    """The tensors of `node`'s inputs, all in one layout, ready to broadcast; and that layout."""
    layout, rank = _operand_layout(lowering, node), _rank(lowering, node)
    return [_operand(lowering, name, rank, layout) for name in node.inputs], layout


def _operand_layout(lowering: Lowering, node: Node) -> Layout:
    ranks = {lowering.shape(name).rank for name in node.inputs if not lowering.is_constant(name)}
    return lowering.common_layout(node.inputs) if ranks == {_rank(lowering, node)} else Layout.NATIVE


def _rank(lowering: Lowering, node: Node) -> int:
    return lowering.shape(node.outputs[0]).rank


def _operand(lowering: Lowering, name: str, rank: int, layout: Layout) -> int:
    if not lowering.is_constant(name):
        return lowering.tensor(name, layout)
    return broadcast_constant(lowering, lowering.value(name, f"{name!r}"), name, rank, layout)


def broadcast_constant(
    lowering: Lowering, array: NDArray[Any], name: str, rank: int, layout: Layout, drop_batch: bool = False
) -> int:
    """`array` as the operand of a value of `rank` in `layout`: its axes moved along with that value's."""
    if layout is Layout.CHANNELS_LAST and array.size > 1:
        array = array.reshape((1,) * (rank - array.ndim) + array.shape)
        array = np.moveaxis(array, 1, -1)
        array = array[:, None] if rank == 3 else array
    elif drop_batch and array.ndim < rank:
        array = array.reshape((1,) * (rank - array.ndim) + array.shape)
    if drop_batch and array.ndim:
        array = array.reshape(array.shape[1:])
    if array.dtype not in TENSOR_TYPES:
        raise Uncovered(f"{name!r} has dtype {array.dtype}; convert the model to float32")
    return lowering.constant(array, name, array.dtype)


LOWERINGS: dict[str, Callable[[Lowering, Node], None]] = {
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(ARITHMETIC, arithmetic),
    **dict.fromkeys(BINARY, binary),
    **dict.fromkeys(VARIADIC, variadic),
    "Cast": cast,
    "Clip": clip,
    "Div": divide,
    "Dropout": identity,
    "Elu": elu,
    "Gelu": gelu,
    "HardSigmoid": hard_sigmoid,
    "Identity": identity,
    "LeakyRelu": leaky_relu,
    "Neg": negative,
    "PRelu": prelu,
    "Pow": power,
    "Reciprocal": reciprocal,
    "Softplus": softplus,
    "Softsign": softsign,
    "Where": where,
}
