"""Arithmetic, comparisons and logic of several operands, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering, in_layout
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op, Write
from edgert_deploy.packager.tflite_lowering.ops.operands import of_several, operand_layout, operands
from edgert_deploy.packager.tflite_lowering.value import BOOL, FLOAT32, INT32, INT64, Unsupported, Value, broadcast

# Three quotients of at least 22 bits give 64 bits.
LONG_DIVISION_STEPS = 3


def arithmetic(code: str) -> Write:
    """Return a writer that writes each node as `code`: ADD, SUB or MUL, which can clamp their result."""
    return of_several(lambda pair, node: pair[0].binary(code, pair[1], activation=node.activation))


def test(code: str) -> Write:
    """Return a writer that writes each node as `code`, a comparison or a logical operator."""
    return of_several(lambda pair, node: pair[0].binary(code, pair[1], dtype=BOOL))


def select(condition: Value, if_true: Value, if_false: Value) -> Value:
    shape = broadcast(condition.shape, broadcast(if_true.shape, if_false.shape))
    return condition.op("SELECT_V2", if_true, if_false, shape=shape, dtype=if_false.dtype)


def variadic(code: str) -> Write:
    """Return a writer for any number of operands, which TFLite's operator `code` joins two at a time."""
    return of_several(lambda values, node: _joined(code, values))


def mean(values: list[Value], node: Node) -> Value:
    return _joined("ADD", values) * (1 / len(values))


def _joined(code: str, values: list[Value]) -> Value:
    return reduce(lambda joined, value: joined.binary(code, value), values)


def divide(lowering: Lowering, node: Node) -> None:
    """Divide. A constant divisor becomes a factor, because DIV has no INT8 kernel."""
    divisor = lowering.graph.constants.get(node.inputs[1])
    dtype = lowering.dtype(node.outputs[0])
    if dtype in (INT32, INT64) or divisor is None or (divisor == 0).any():
        (x, y), layout = operands(lowering, node)
        lowering.result(node, _long_division(x, y) if dtype == INT64 else x / y, layout)
        return
    layout = operand_layout(lowering, node)
    inverse = (1 / lowering.value(node.inputs[1], "the divisor").astype(np.float64)).astype(np.float32)
    inverse = in_layout(inverse, lowering.shape(node.outputs[0]).rank, layout)
    lowering.result(node, lowering.read(node, 0, layout) * inverse, layout)


def _long_division(x: Value, y: Value) -> Value:
    """Divide int64 values in float32, in several steps, because DIV does not support int64.

    FLOOR_MOD first removes the remainder, so the dividend is a multiple of the divisor. At least the upper 22 bits of
    each quotient are correct. Each step subtracts the exact product of its quotient and the divisor from the dividend.
    So the dividend of the last step is small, and the rounding makes the quotient of this step exact.
    """
    divisor, remaining = y.cast(FLOAT32), x - _rest_with_dividends_sign(x, y)
    quotients = []
    for _ in range(LONG_DIVISION_STEPS):
        quotients.append((remaining.cast(FLOAT32) / divisor).op("ROUND").cast(INT64))
        remaining = remaining - quotients[-1] * y
    return _joined("ADD", quotients)


def modulo(pair: list[Value], node: Node) -> Value:
    """Write Mod. The result has the divisor's sign, as in FLOOR_MOD; with `fmod`, the dividend's sign."""
    x, y = pair
    return _rest_with_dividends_sign(x, y) if node.attributes.get("fmod", 0) else x.binary("FLOOR_MOD", y)


def _rest_with_dividends_sign(x: Value, y: Value) -> Value:
    """Return the remainder as in C: the remainder of the magnitudes, with the dividend's sign."""
    rest = _magnitude(x).binary("FLOOR_MOD", _magnitude(y))
    if x.dtype != INT64:
        return rest * x.op("SIGN")
    return select(x.op("LESS", 0, dtype=BOOL), rest.op("NEG"), rest)


def _magnitude(x: Value) -> Value:
    return x.op("ABS") if x.dtype != INT64 else x.op("MAXIMUM", x.op("NEG"))


def power(lowering: Lowering, node: Node) -> None:
    """Raise to a power. The result has the base's dtype, whatever the exponent's dtype."""
    base, exponent = node.inputs
    dtype, power_of = lowering.dtype(base), lowering.links.scalar(exponent)
    keeps_shape = lowering.shape(base).dims == lowering.shape(node.outputs[0]).dims
    if power_of is not None and power_of in KNOWN_POWERS and keeps_shape and (dtype == FLOAT32 or power_of >= 1):
        x, layout = lowering.read_as_made(node)
        lowering.result(node, KNOWN_POWERS[power_of](x), layout)
        return
    (x, y), layout = operands(lowering, node)
    if FLOAT32 not in (x.dtype, y.dtype):
        if {x.dtype, y.dtype} != {INT32}:
            raise Unsupported(f"TFLite raises float32 and int32 to a power, not {dtype}; cast to one of them")
        lowering.result(node, x.binary("POW", y), layout)
        return
    floats = [value if value.dtype == FLOAT32 else value.cast(FLOAT32) for value in (x, y)]
    raised = floats[0].binary("POW", floats[1])
    lowering.result(node, raised if dtype == FLOAT32 else raised.cast(dtype), layout)


KNOWN_POWERS: dict[float, Callable[[Value], Value]] = {
    0.5: lambda x: x.op("SQRT"),
    1.0: lambda x: x * 1,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
}

OPS = {
    "Add": Op(arithmetic("ADD"), widens=NARROW, clamps=True),
    "And": Op(test("LOGICAL_AND")),
    "Div": Op(divide, widens=NARROW, stays_float=True),
    "Equal": Op(test("EQUAL"), widens=NARROW, stays_float=True),
    "Greater": Op(test("GREATER"), widens=NARROW, stays_float=True),
    "GreaterOrEqual": Op(test("GREATER_EQUAL"), widens=NARROW, stays_float=True),
    "Less": Op(test("LESS"), widens=NARROW, stays_float=True),
    "LessOrEqual": Op(test("LESS_EQUAL"), widens=NARROW, stays_float=True),
    "Max": Op(variadic("MAXIMUM"), widens=NARROW),
    "Mean": Op(of_several(mean), widens=NARROW),
    "Min": Op(variadic("MINIMUM"), widens=NARROW),
    "Mod": Op(of_several(modulo), widens=NARROW, stays_float=True),
    "Mul": Op(arithmetic("MUL"), widens=NARROW, clamps=True),
    "Or": Op(test("LOGICAL_OR")),
    "Pow": Op(power, widens=NARROW, stays_float=True),
    "Sub": Op(arithmetic("SUB"), widens=NARROW, clamps=True),
    "Sum": Op(variadic("ADD"), widens=NARROW),
    "Where": Op(of_several(lambda values, node: select(*values)), stays_float=True),
    "Xor": Op(test("NOT_EQUAL")),
}
