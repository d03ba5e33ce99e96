"""Activations, and Softmax over any axis."""

from __future__ import annotations

from edgert_deploy.packager.tflite_lowering.fusion import clamp_name
from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering, in_layout
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op
from edgert_deploy.packager.tflite_lowering.ops.elementwise import unary
from edgert_deploy.packager.tflite_lowering.ops.operands import of_one, operands
from edgert_deploy.packager.tflite_lowering.value import BOOL, FLOAT32, Unsupported, Value

PER_AXIS_SOFTMAX_OPSET = 13  # before this opset, Softmax treated all axes from `axis` on as one axis
CLIP_BOUNDS = {1: ("min", "MAXIMUM"), 2: ("max", "MINIMUM")}


def relu(x: Value, node: Node) -> Value:
    return x.op("RELU") if x.dtype == FLOAT32 else x.op("MAXIMUM", 0)


def clip(lowering: Lowering, node: Node) -> None:
    """Apply the lower bound, then the upper bound. If the bounds cross, the upper bound decides."""
    x, layout = lowering.read_as_made(node)
    name = clamp_name(node, lowering.links.scalar)
    if name != "NONE" and x.dtype == FLOAT32:
        lowering.result(node, x.op(name), layout)
        return
    for index, (attribute, code) in CLIP_BOUNDS.items():
        if attribute in node.attributes:
            x = x.op(code, float(node.attributes[attribute]))
        elif node.input(index):
            x = x.op(code, lowering.read(node, index))
    lowering.result(node, x, layout)


def gelu(x: Value, node: Node) -> Value:
    return x.op("GELU", approximate=node.attributes.get("approximate", "none") == "tanh")


def leaky_relu(x: Value, node: Node) -> Value:
    return x.op("LEAKY_RELU", alpha=float(node.attributes.get("alpha", 0.01)))


def prelu(lowering: Lowering, node: Node) -> None:
    """Write PRELU if all items share a constant slope. Otherwise write MAXIMUM, MINIMUM, MUL and ADD."""
    slope, rank = lowering.graph.constants.get(node.inputs[1]), lowering.shape(node.outputs[0]).rank
    if slope is not None and lowering.dtype(node.inputs[0]) == FLOAT32 and (slope.ndim < rank or slope.shape[0] == 1):
        x, layout = lowering.read_as_made(node)
        whole = in_layout(slope.reshape((1,) * (rank - slope.ndim) + slope.shape), rank, layout)
        y = x.op("PRELU", whole.reshape(whole.shape[1:]))
    else:
        (x, slopes), layout = operands(lowering, node)
        y = x.op("MAXIMUM", 0) + x.op("MINIMUM", 0) * slopes
    lowering.result(node, y, layout)


def elu(x: Value, node: Node) -> Value:
    """Compute relu(x) + alpha * elu(min(x, 0)), because the alpha of TFLite's ELU is 1."""
    alpha = float(node.attributes.get("alpha", 1.0))
    if alpha == 1:
        return x.op("ELU")
    above, below = _halves(x)
    return above + below.op("ELU") * alpha


def selu(x: Value, node: Node) -> Value:
    alpha = float(node.attributes.get("alpha", 1.67326319217681884765625))
    gamma = float(node.attributes.get("gamma", 1.05070102214813232421875))
    above, below = _halves(x)
    return above * gamma + below.op("ELU") * (alpha * gamma)


def celu(x: Value, node: Node) -> Value:
    alpha = float(node.attributes.get("alpha", 1.0))
    above, below = _halves(x)
    return above + (below * (1 / alpha)).op("ELU") * alpha


def _halves(x: Value) -> tuple[Value, Value]:
    """Return max(x, 0) and min(x, 0)."""
    above = x.op("RELU")
    return above, x - above


def softplus(x: Value) -> Value:
    """Compute max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    decay = (x.op("ABS") * -1).op("EXP")
    return x.op("RELU") + (decay + 1).op("LOG")


def mish(x: Value, node: Node) -> Value:
    """Compute x * tanh(softplus(x)) as x * s * (1 + n) / (1 + n * n), where s = sigmoid(x) and n = 1 - s.

    No step of this form overflows or loses digits, and every step has an INT8 kernel (1 / d is rsqrt(d) squared).
    """
    sigmoid = x.op("LOGISTIC")
    rest = 1 - sigmoid
    root = (rest * rest + 1).op("RSQRT")
    return x * sigmoid * ((rest + 1) * (root * root))


def hard_sigmoid(x: Value, alpha: float, beta: float) -> Value:
    """Compute clip(alpha * x + beta, 0, 1) as relu6(6 * (alpha * x + beta)) / 6."""
    return (x * (6 * alpha)).op("ADD", 6 * beta, activation="RELU6") * (1 / 6)


def _hard_sigmoid(x: Value, node: Node) -> Value:
    return hard_sigmoid(x, *(float(node.attributes.get(k, d)) for k, d in (("alpha", 0.2), ("beta", 0.5))))


def hard_swish_in_int8(x: Value, node: Node) -> Value:
    """Compute x * relu6(x + 3) / 6.

    XNNPACK lacks HARD_SWISH in INT8, and TFLite's own kernel is many times slower.
    """
    return x * (x.op("ADD", 3.0, activation="RELU6") * (1 / 6))


def thresholded_relu(x: Value, node: Node) -> Value:
    alpha = float(node.attributes.get("alpha", 1.0))
    above = x.op("GREATER", alpha, dtype=BOOL)
    return above.op("SELECT_V2", x, x.constant(0), dtype=FLOAT32)


# --- Softmax


def softmax(lowering: Lowering, node: Node) -> None:
    """Write SOFTMAX, which runs over the last axis. Another axis moves to the end and back."""
    shape, layout = lowering.shape(node.inputs[0]), lowering.layout(node.inputs[0])
    per_axis = lowering.graph.opset >= PER_AXIS_SOFTMAX_OPSET
    axis = node.axis(shape.rank, default=-1 if per_axis else 1)
    if not per_axis and axis != shape.rank - 1:
        raise Unsupported(
            f"before opset 13, axis {axis} and all later axes count as one axis; export the model with opset 13"
        )
    if layout is Layout.CHANNELS_LAST and axis == 1:
        lowering.result(node, _softmax(lowering.read(node, 0, layout), node), layout)
    else:
        lowering.result(node, lowering.read(node).along_last(axis, lambda x: _softmax(x, node)))


def _softmax(x: Value, node: Node) -> Value:
    return x.op("LOG_SOFTMAX") if node.op_type == "LogSoftmax" else x.op("SOFTMAX", beta=1.0)


OPS = {
    "Celu": Op(of_one(celu)),
    "Clip": Op(clip, widens=NARROW),
    "Elu": Op(of_one(elu), stays_float=True),
    "Gelu": Op(of_one(gelu)),
    "HardSigmoid": Op(of_one(_hard_sigmoid), sign="non_negative"),
    "HardSwish": Op(unary("HARD_SWISH")),
    "LeakyRelu": Op(of_one(leaky_relu)),
    "LogSoftmax": Op(softmax),
    "Mish": Op(of_one(mish)),
    "PRelu": Op(prelu, widens=NARROW),
    "Relu": Op(of_one(relu), widens=NARROW, sign="non_negative"),
    "Selu": Op(of_one(selu)),
    "Sigmoid": Op(unary("LOGISTIC"), sign="non_negative"),
    "Softmax": Op(softmax, sign="non_negative"),
    "Softplus": Op(of_one(lambda x, node: softplus(x)), sign="non_negative"),
    "Softsign": Op(of_one(lambda x, node: x / (x.op("ABS") + 1)), stays_float=True),
    "Tanh": Op(unary("TANH")),
    "ThresholdedRelu": Op(of_one(thresholded_relu)),
}

# Operators that a full INT8 artifact computes in another way than a float artifact.
IN_INT8 = {"HardSwish": Op(of_one(hard_swish_in_int8))}
