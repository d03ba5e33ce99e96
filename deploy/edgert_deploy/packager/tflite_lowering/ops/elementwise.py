"""Element-wise operators of one input: functions, casts, tests of a value."""

from __future__ import annotations

import numpy as np

from edgert_deploy.packager.tflite_lowering.fusion import RSQRT
from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op, Write
from edgert_deploy.packager.tflite_lowering.ops.operands import BOOL, INT32, Steps, comparable_zero

# erf(x) = tanh(x * p(x * x)) for |x| below ERF_LIMIT; beyond it, erf is 1 in float32. p is a least-squares fit of
# atanh(erf(x)) / x, weighted more where the error was largest; the result differs by at most 2e-7 in float32.
ERF_LIMIT = 3.9
ERF_POLYNOMIAL = (
    1.128379274339149,
    0.10276905540967116,
    -0.00019182975375383533,
    -0.000619785704983731,
    8.763776744233771e-05,
    -5.66855376802566e-06,
    1.4185696280185596e-07,
)


def unary(code: str) -> Write:
    """Return a writer of nodes as the TFLite operator `code`."""

    def write(lowering: Lowering, node: Node) -> None:
        steps = Steps(lowering, node)
        steps.last(code, steps.x)

    return write


def absolute(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    if steps.dtype in (FLOAT32, INT32):
        steps.last("ABS", steps.x)
    else:
        steps.last("MAXIMUM", steps.x, steps.between("NEG", steps.x))


def negative(lowering: Lowering, node: Node) -> None:
    """Multiply by -1: the quantiser leaves NEG in float32."""
    steps = Steps(lowering, node)
    if steps.dtype == FLOAT32:
        steps.last("MUL", steps.x, steps.constant(-1.0))
    else:
        steps.last("NEG", steps.x)


def sign(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    if steps.dtype in (FLOAT32, INT32):
        steps.last("SIGN", steps.x)
        return
    above, below = (
        steps.cast(steps.between(code, steps.x, steps.constant(0), dtype=BOOL), BOOL, steps.dtype)
        for code in ("GREATER", "LESS")
    )
    steps.last("SUB", above, below)


def reciprocal(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("DIV", steps.constant(1.0), steps.x)


def erf(lowering: Lowering, node: Node) -> None:
    """Compute ERF_POLYNOMIAL, since TFLite has no such operator. A GELU around it was fused before."""
    steps = Steps(lowering, node)
    x = steps.between("MAXIMUM", steps.x, steps.constant(-ERF_LIMIT))
    x = steps.between("MINIMUM", x, steps.constant(ERF_LIMIT))
    squared = steps.between("MUL", x, x)
    value = steps.constant(ERF_POLYNOMIAL[-1])
    for coefficient in reversed(ERF_POLYNOMIAL[:-1]):
        value = steps.between("ADD", steps.between("MUL", squared, value), steps.constant(coefficient))
    steps.last("TANH", steps.between("MUL", x, value))


def cast(lowering: Lowering, node: Node) -> None:
    """Cast. From float to integer TFLite drops the fraction, like ONNX."""
    steps, after = Steps(lowering, node), lowering.dtype(node.outputs[0])
    lowering.cast(steps.x, lowering.define(node.outputs[0], steps.layout), steps.dtype, after)


def identity(lowering: Lowering, node: Node) -> None:
    layout = lowering.layout(node.inputs[0])
    lowering.alias(node.outputs[0], layout, lowering.tensor(node.inputs[0], layout))


def dropout(lowering: Lowering, node: Node) -> None:
    """Pass the input on: inference drops nothing, and the mask is true everywhere."""
    if node.input(2) and lowering.value(node.inputs[2], "training_mode").any():
        raise Uncovered("it is in training mode; export the model for inference")
    identity(lowering, node)
    if len(node.outputs) > 1 and node.outputs[1]:
        shape = lowering.shape(node.outputs[1])
        if -1 in shape.signature:
            raise Uncovered("its mask depends on the batch; export the model with its batch fixed to 1")
        mask = lowering.constant(np.ones(shape.dims, bool), node.outputs[1], bool)
        lowering.reshape(mask, shape, lowering.define(node.outputs[1]))


def is_nan(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("NOT_EQUAL", steps.x, steps.x)


def is_inf(lowering: Lowering, node: Node) -> None:
    """Test that x - x is not a number and x is one, and that x has the wanted sign."""
    steps = Steps(lowering, node)
    difference = steps.between("SUB", steps.x, steps.x)
    conditions = [
        steps.between("NOT_EQUAL", difference, difference, dtype=BOOL),
        steps.between("EQUAL", steps.x, steps.x, dtype=BOOL),
    ]
    zero = comparable_zero(lowering, node.outputs[0])
    for sign_name, opposite in (("positive", "LESS"), ("negative", "GREATER")):
        if not node.attributes.get(f"detect_{sign_name}", 1):
            conditions.append(steps.between(opposite, steps.x, zero, dtype=BOOL))
    held = conditions[0]
    for condition in conditions[1:-1]:
        held = steps.between("LOGICAL_AND", held, condition, dtype=BOOL)
    steps.last("LOGICAL_AND", held, conditions[-1])


OPS = {
    "Abs": Op(absolute, widens=NARROW, sign="non_negative"),
    "Cast": Op(cast, stays_float=True),
    "Ceil": Op(unary("CEIL"), stays_float=True),
    "Cos": Op(unary("COS"), stays_float=True),
    "Dropout": Op(dropout, sign="as_input"),
    "Erf": Op(erf),
    "Exp": Op(unary("EXP"), sign="non_negative"),
    "Floor": Op(unary("FLOOR"), stays_float=True),
    "Identity": Op(identity, sign="as_input"),
    "IsInf": Op(is_inf, stays_float=True),
    "IsNaN": Op(is_nan, stays_float=True),
    "Log": Op(unary("LOG"), stays_float=True),
    "Neg": Op(negative, widens=NARROW),
    "Not": Op(unary("LOGICAL_NOT")),
    "Reciprocal": Op(reciprocal, stays_float=True),
    "Round": Op(unary("ROUND"), stays_float=True),
    RSQRT: Op(unary("RSQRT")),
    "Sign": Op(sign, widens=NARROW, stays_float=True),
    "Sin": Op(unary("SIN"), stays_float=True),
    "Sqrt": Op(unary("SQRT"), sign="non_negative", stays_float=True),
}
