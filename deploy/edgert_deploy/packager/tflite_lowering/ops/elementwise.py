"""Element-wise operators with one input: functions, casts, tests of a value."""

from __future__ import annotations

from edgert_deploy.packager.tflite_lowering.fusion import RSQRT
from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op, Write
from edgert_deploy.packager.tflite_lowering.ops.operands import of_one
from edgert_deploy.packager.tflite_lowering.value import BOOL, FLOAT32, INT32, Unsupported, Value

# erf(x) = tanh(x * p(x * x)) for |x| below ERF_LIMIT. For a larger |x|, erf is 1 or -1 in float32. The polynomial p is
# a weighted least-squares fit of atanh(erf(x)) / x. In float32, the result differs from erf by at most 2e-7.
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
    """Return a writer that writes each node as the TFLite operator `code`."""
    return of_one(lambda x, node: x.op(code))


def absolute(x: Value, node: Node) -> Value:
    return x.op("ABS") if x.dtype in (FLOAT32, INT32) else x.op("MAXIMUM", x.op("NEG"))


def negative(x: Value, node: Node) -> Value:
    """Multiply by -1, because the quantizer leaves NEG in float32."""
    return x * -1 if x.dtype == FLOAT32 else x.op("NEG")


def sign(x: Value, node: Node) -> Value:
    if x.dtype in (FLOAT32, INT32):
        return x.op("SIGN")
    above, below = (x.op(code, 0, dtype=BOOL).cast(x.dtype) for code in ("GREATER", "LESS"))
    return above - below


def erf(x: Value, node: Node) -> Value:
    """Compute Erf by ERF_POLYNOMIAL, because TFLite lacks Erf. (fusion.py replaces the Erf of a GELU.)"""
    x = x.op("MAXIMUM", -ERF_LIMIT).op("MINIMUM", ERF_LIMIT)
    squared = x * x
    value = x.constant(ERF_POLYNOMIAL[-1])
    for coefficient in reversed(ERF_POLYNOMIAL[:-1]):
        value = squared * value + coefficient
    return (x * value).op("TANH")


def cast(lowering: Lowering, node: Node) -> None:
    """Write Cast. TFLite, like ONNX, drops the fraction of a float that becomes an integer."""
    x, layout = lowering.read_as_made(node)
    lowering.result(node, x.cast(lowering.dtype(node.outputs[0])), layout)


def dropout(lowering: Lowering, node: Node) -> None:
    """Return the input, because inference drops no elements. The output `mask` is not supported."""
    if node.input(2) and lowering.value(node.inputs[2], "training_mode").any():
        raise Unsupported("it is in training mode; export the model for inference")
    x, layout = lowering.read_as_made(node)
    lowering.result(node, x, layout)


def is_inf(x: Value, node: Node) -> Value:
    """Test that x - x is NaN, that x is not NaN, and that x has the wanted sign."""
    difference = x - x
    result = difference.op("NOT_EQUAL", difference, dtype=BOOL).op("LOGICAL_AND", x.op("EQUAL", x, dtype=BOOL))
    for sign_name, opposite in (("positive", "LESS"), ("negative", "GREATER")):
        if not node.attributes.get(f"detect_{sign_name}", 1):
            result = result.op("LOGICAL_AND", x.op(opposite, 0, dtype=BOOL))
    return result


OPS = {
    "Abs": Op(of_one(absolute), widens=NARROW, sign="non_negative"),
    "Cast": Op(cast, stays_float=True),
    "Ceil": Op(unary("CEIL"), stays_float=True),
    "Cos": Op(unary("COS"), stays_float=True),
    "Dropout": Op(dropout, sign="as_input"),
    "Erf": Op(of_one(erf)),
    "Exp": Op(unary("EXP"), sign="non_negative"),
    "Floor": Op(unary("FLOOR"), stays_float=True),
    "Identity": Op(of_one(lambda x, node: x), sign="as_input"),
    "IsInf": Op(of_one(is_inf), stays_float=True),
    "IsNaN": Op(of_one(lambda x, node: x.op("NOT_EQUAL", x, dtype=BOOL)), stays_float=True),
    "Log": Op(unary("LOG"), stays_float=True),
    "Neg": Op(of_one(negative), widens=NARROW),
    "Not": Op(unary("LOGICAL_NOT")),
    "Reciprocal": Op(of_one(lambda x, node: x.constant(1) / x), stays_float=True),
    "Round": Op(unary("ROUND"), stays_float=True),
    RSQRT: Op(unary("RSQRT")),
    "Sign": Op(of_one(sign), widens=NARROW, stays_float=True),
    "Sin": Op(unary("SIN"), stays_float=True),
    "Sqrt": Op(unary("SQRT"), sign="non_negative", stays_float=True),
}
