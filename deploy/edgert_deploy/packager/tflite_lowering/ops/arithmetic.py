"""Arithmetic, comparisons and logic of several operands, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op, Write
from edgert_deploy.packager.tflite_lowering.ops.elementwise import identity
from edgert_deploy.packager.tflite_lowering.ops.operands import (
    BOOL,
    INT32,
    INT64,
    Operands,
    Steps,
    broadcast_constant,
    comparable_zero,
)

# Three quotients of 22 bits or more make 64 bits.
LONG_DIVISION_STEPS = 3


def arithmetic(code: str) -> Write:
    """Return a writer of ADD, SUB or MUL nodes, which can clamp their result."""

    def write(lowering: Lowering, node: Node) -> None:
        operands = Operands(lowering, node)
        lowering.arithmetic(code, operands.tensors, operands.define(), node.activation)

    return write


def binary(code: str) -> Write:
    return lambda lowering, node: Operands(lowering, node).last(code)


def comparison(code: str) -> Write:
    def write(lowering: Lowering, node: Node) -> None:
        operands = Operands(lowering, node)
        operands.tensors = [
            comparable_zero(lowering, name) if _is_float_zero(lowering, name) else tensor
            for name, tensor in zip(node.inputs, operands.tensors, strict=True)
        ]
        operands.last(code)

    return write


def _is_float_zero(lowering: Lowering, name: str) -> bool:
    array = lowering.graph.constants.get(name)
    return array is not None and array.dtype == FLOAT32 and array.size == 1 and not array.any()


def variadic(code: str) -> Write:
    """Return a writer of nodes with any number of operands, joined two at a time."""

    def write(lowering: Lowering, node: Node) -> None:
        if len(node.inputs) == 1:
            identity(lowering, node)
            return
        operands = Operands(lowering, node)
        operands.joined(code, operands.define())

    return write


def mean(lowering: Lowering, node: Node) -> None:
    operands = Operands(lowering, node)
    share = lowering.constant(1 / len(node.inputs), f"{node.outputs[0]}_share")
    lowering.arithmetic("MUL", [operands.joined("ADD"), share], operands.define())


def divide(lowering: Lowering, node: Node) -> None:
    """Divide. A constant divisor becomes a factor, because DIV has no INT8 kernel."""
    divisor = lowering.graph.constants.get(node.inputs[1])
    dtype = lowering.dtype(node.outputs[0])
    operands = Operands(lowering, node)
    if dtype == INT64:
        _long_division(lowering, node, operands)
        return
    if dtype == INT32 or divisor is None or (divisor == 0).any():
        lowering.arithmetic("DIV", operands.tensors, operands.define())
        return
    inverse = (1 / lowering.value(node.inputs[1], "the divisor").astype(np.float64)).astype(np.float32)
    factor = broadcast_constant(lowering, inverse, f"{node.inputs[1]}_inverse", operands.rank, operands.layout)
    lowering.arithmetic("MUL", [operands.tensors[0], factor], operands.define())


def _long_division(lowering: Lowering, node: Node, operands: Operands) -> None:
    """Divide int64, which DIV does not take, by float32 quotients of the part that is left to divide.

    Each quotient is right in its upper 22 bits or more, and its product is subtracted exactly. The last one divides a
    multiple of the divisor (FLOOR_MOD removed the remainder first), so that rounding makes it exact.
    """
    x, y = operands.tensors
    shape = lowering.shape(node.outputs[0])

    def step(code: str, *inputs: int, dtype: np.dtype[np.generic] = INT64) -> int:
        output = operands.scratch(shape, dtype)
        lowering.emit(code, list(inputs), [output])
        return output

    def as_float(tensor: int, held: BatchShape) -> int:
        return lowering.cast(tensor, operands.scratch(held, FLOAT32), INT64, FLOAT32)

    divisor = as_float(y, operands.shapes[1])
    left = step("SUB", x, _rest_with_dividends_sign(lowering, node, operands))
    quotient = None
    for _ in range(LONG_DIVISION_STEPS):
        part = step("ROUND", step("DIV", as_float(left, shape), divisor, dtype=FLOAT32), dtype=FLOAT32)
        whole = lowering.cast(part, operands.scratch(shape), FLOAT32, INT64)
        left = step("SUB", left, step("MUL", whole, y))
        quotient = whole if quotient is None else step("ADD", quotient, whole)
    assert quotient is not None
    lowering.reshape(quotient, lowering.laid_out(shape, operands.layout), operands.define())


def modulo(lowering: Lowering, node: Node) -> None:
    """FLOOR_MOD has the divisor's sign, like ONNX's integers; `fmod` has the dividend's."""
    operands = Operands(lowering, node)
    if not node.attributes.get("fmod", 0):
        operands.last("FLOOR_MOD")
        return
    _rest_with_dividends_sign(lowering, node, operands, operands.define())


def _rest_with_dividends_sign(lowering: Lowering, node: Node, operands: Operands, output: int | None = None) -> int:
    """Write C's remainder, into `output` where it is given: that of the magnitudes, with the dividend's sign."""
    (x, y), (x_shape, y_shape), shape = operands.tensors, operands.shapes, lowering.shape(node.outputs[0])
    rest = operands.scratch(shape)
    lowering.emit("FLOOR_MOD", [_magnitude(operands, x, x_shape), _magnitude(operands, y, y_shape)], [rest])
    target = operands.scratch(shape) if output is None else output
    if operands.dtype != INT64:
        sign = operands.scratch(x_shape)
        lowering.emit("SIGN", [x], [sign])
        return lowering.arithmetic("MUL", [rest, sign], target)
    negative, below = operands.scratch(shape), operands.scratch(x_shape, BOOL)
    lowering.emit("NEG", [rest], [negative])
    lowering.emit("LESS", [x, lowering.constant(0, f"{node.outputs[0]}_zero", INT64)], [below])
    lowering.emit("SELECT_V2", [below, negative, rest], [target])
    return target


def _magnitude(operands: Operands, tensor: int, shape: BatchShape) -> int:
    size = operands.scratch(shape)
    if operands.dtype != INT64:
        operands.lowering.emit("ABS", [tensor], [size])
        return size
    turned = operands.scratch(shape)
    operands.lowering.emit("NEG", [tensor], [turned])
    operands.lowering.emit("MAXIMUM", [tensor, turned], [size])
    return size


def power(lowering: Lowering, node: Node) -> None:
    """Raise to a power. The result has the base's dtype, whatever the exponent's."""
    base, exponent = node.inputs
    dtype, constant = lowering.dtype(base), lowering.graph.constants.get(exponent)
    known = constant is not None and constant.size == 1 and float(constant.reshape(())) in KNOWN_POWERS
    same = lowering.shape(base).dims == lowering.shape(node.outputs[0]).dims
    if constant is not None and known and same and (dtype == FLOAT32 or float(constant.reshape(())) >= 1):
        KNOWN_POWERS[float(constant.reshape(()))](Steps(lowering, node))
        return
    if lowering.dtype(exponent) == FLOAT32 or dtype == FLOAT32:
        _float_power(lowering, node)
        return
    if {dtype, lowering.dtype(exponent)} != {INT32}:
        raise Uncovered(f"TFLite raises float32 and int32 to a power, not {dtype}; cast to one of them")
    Operands(lowering, node).last("POW")


def _float_power(lowering: Lowering, node: Node) -> None:
    operands = Operands(lowering, node)
    floats = []
    for name, tensor, shape in zip(node.inputs, operands.tensors, operands.shapes, strict=True):
        held = lowering.dtype(name)
        is_float = held == FLOAT32
        floats.append(tensor if is_float else lowering.cast(tensor, operands.scratch(shape, FLOAT32), held, FLOAT32))
    dtype = lowering.dtype(node.outputs[0])
    if dtype == FLOAT32:
        lowering.emit("POW", floats, [operands.define()])
        return
    result = operands.scratch(lowering.shape(node.outputs[0]), FLOAT32)
    lowering.emit("POW", floats, [result])
    lowering.cast(result, operands.define(), FLOAT32, dtype)


KNOWN_POWERS: dict[float, Callable[[Steps], None]] = {
    0.5: lambda steps: steps.last("SQRT", steps.x),
    1.0: lambda steps: steps.last("MUL", steps.x, steps.constant(1.0)),
    2.0: lambda steps: steps.last("MUL", steps.x, steps.x),
    3.0: lambda steps: steps.last("MUL", steps.between("MUL", steps.x, steps.x), steps.x),
}

OPS = {
    "Add": Op(arithmetic("ADD"), widens=NARROW, clamps=True),
    "And": Op(binary("LOGICAL_AND")),
    "Div": Op(divide, widens=NARROW, stays_float=True),
    "Equal": Op(comparison("EQUAL"), widens=NARROW),
    "Greater": Op(comparison("GREATER"), widens=NARROW),
    "GreaterOrEqual": Op(comparison("GREATER_EQUAL"), widens=NARROW),
    "Less": Op(comparison("LESS"), widens=NARROW),
    "LessOrEqual": Op(comparison("LESS_EQUAL"), widens=NARROW),
    "Max": Op(variadic("MAXIMUM"), widens=NARROW),
    "Mean": Op(mean, widens=NARROW),
    "Min": Op(variadic("MINIMUM"), widens=NARROW),
    "Mod": Op(modulo, widens=NARROW, stays_float=True),
    "Mul": Op(arithmetic("MUL"), widens=NARROW, clamps=True),
    "Or": Op(binary("LOGICAL_OR")),
    "Pow": Op(power, widens=NARROW, stays_float=True),
    "Sub": Op(arithmetic("SUB"), widens=NARROW, clamps=True),
    "Sum": Op(variadic("ADD"), widens=NARROW),
    "Where": Op(binary("SELECT_V2"), stays_float=True),
    "Xor": Op(binary("NOT_EQUAL")),
}
