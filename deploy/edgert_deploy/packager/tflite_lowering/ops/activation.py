"""Activations, and Softmax over any axis."""

from __future__ import annotations

import numpy as np

from edgert_deploy.packager.tflite_lowering.fusion import clamp_name
from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Layout, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op
from edgert_deploy.packager.tflite_lowering.ops.elementwise import identity, unary
from edgert_deploy.packager.tflite_lowering.ops.operands import (
    BOOL,
    Operands,
    Steps,
    channels_last_constant,
    comparable_zero,
)

PER_AXIS_SOFTMAX_OPSET = 13  # before it, Softmax took all axes from `axis` on as one
CLIP_BOUNDS = {1: ("min", "MAXIMUM"), 2: ("max", "MINIMUM")}


def relu(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    if steps.dtype == FLOAT32:
        steps.last("RELU", steps.x)
    else:
        steps.last("MAXIMUM", steps.x, steps.constant(0))


def clip(lowering: Lowering, node: Node) -> None:
    """Apply the lower bound, then the upper one, which wins where they cross."""
    steps = Steps(lowering, node)
    name = clamp_name(node, lambda bound: _scalar(lowering, bound))
    if name != "NONE" and steps.dtype == FLOAT32:
        steps.last(name, steps.x)
        return
    bounds = [(code, _bound(lowering, node, steps, name, index)) for index, (name, code) in CLIP_BOUNDS.items()]
    given = [(code, bound) for code, bound in bounds if bound is not None]
    if not given:
        identity(lowering, node)
        return
    x = steps.x
    for code, bound in given[:-1]:
        x = steps.between(code, x, bound)
    steps.last(given[-1][0], x, given[-1][1])


def _scalar(lowering: Lowering, name: str) -> float | None:
    array = lowering.graph.constants.get(name)
    return float(array.reshape(())) if array is not None and array.size == 1 else None


def _bound(lowering: Lowering, node: Node, steps: Steps, attribute: str, index: int) -> int | None:
    if attribute in node.attributes:
        return steps.constant(float(node.attributes[attribute]))
    return lowering.native(node.input(index)) if node.input(index) else None


def gelu(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("GELU", steps.x, approximate=node.attributes.get("approximate", "none") == "tanh")


def leaky_relu(lowering: Lowering, node: Node) -> None:
    steps = Steps(lowering, node)
    steps.last("LEAKY_RELU", steps.x, alpha=float(node.attributes.get("alpha", 0.01)))


def prelu(lowering: Lowering, node: Node) -> None:
    """Compose a slope per item, or a computed slope, of other operators: TFLite's PRELU has one for all items."""
    slope = lowering.graph.constants.get(node.inputs[1])
    operands = Operands(lowering, node)
    x, slopes = operands.tensors
    shape = lowering.shape(node.outputs[0])
    rank = shape.rank
    if slope is not None and lowering.dtype(node.inputs[0]) == FLOAT32 and (slope.ndim < rank or slope.shape[0] == 1):
        whole = slope.reshape((1,) * (rank - slope.ndim) + slope.shape)
        if operands.layout is Layout.CHANNELS_LAST:
            whole = channels_last_constant(whole, rank)
        item = lowering.constant(whole.reshape(whole.shape[1:]), node.inputs[1])
        lowering.emit("PRELU", [x, item], [operands.define()])
        return
    zero = lowering.constant(0, f"{node.outputs[0]}_zero", operands.dtype)
    above, below, sloped = (operands.scratch(shape) for _ in range(3))
    lowering.emit("MAXIMUM", [x, zero], [above])
    lowering.emit("MINIMUM", [x, zero], [below])
    lowering.arithmetic("MUL", [below, slopes], sloped)
    lowering.arithmetic("ADD", [above, sloped], operands.define())


def elu(lowering: Lowering, node: Node) -> None:
    """relu(x) + alpha * elu(min(x, 0)): the alpha of TFLite's ELU is 1."""
    alpha, steps = float(node.attributes.get("alpha", 1.0)), Steps(lowering, node)
    if alpha == 1:
        steps.last("ELU", steps.x)
    else:
        above, below = _halves(steps)
        steps.last("ADD", above, steps.between("MUL", steps.between("ELU", below), steps.constant(alpha)))


def selu(lowering: Lowering, node: Node) -> None:
    alpha = float(node.attributes.get("alpha", 1.67326319217681884765625))
    gamma = float(node.attributes.get("gamma", 1.05070102214813232421875))
    steps = Steps(lowering, node)
    above, below = _halves(steps)
    bent = steps.between("MUL", steps.between("ELU", below), steps.constant(alpha * gamma))
    steps.last("ADD", steps.between("MUL", above, steps.constant(gamma)), bent)


def celu(lowering: Lowering, node: Node) -> None:
    alpha, steps = float(node.attributes.get("alpha", 1.0)), Steps(lowering, node)
    above, below = _halves(steps)
    bent = steps.between("ELU", steps.between("MUL", below, steps.constant(1 / alpha)))
    steps.last("ADD", above, steps.between("MUL", bent, steps.constant(alpha)))


def _halves(steps: Steps) -> tuple[int, int]:
    """max(x, 0) and min(x, 0)."""
    above = steps.between("RELU", steps.x)
    return above, steps.between("SUB", steps.x, above)


def softplus(lowering: Lowering, node: Node) -> None:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    steps = Steps(lowering, node)
    decay = steps.between("EXP", steps.between("MUL", steps.between("ABS", steps.x), steps.constant(-1.0)))
    smooth = steps.between("LOG", steps.between("ADD", decay, steps.constant(1.0)))
    steps.last("ADD", steps.between("RELU", steps.x), smooth)


def mish(lowering: Lowering, node: Node) -> None:
    """x * tanh(softplus(x)) = x * s * (1 + n) / (1 + n * n), where s = sigmoid(x) and n = 1 - s.

    In this form nothing overflows or cancels, and every step has an INT8 kernel (1 / d is rsqrt(d) squared).
    """
    steps = Steps(lowering, node)
    sigmoid = steps.between("LOGISTIC", steps.x)
    rest = steps.between("SUB", steps.constant(1.0), sigmoid)
    root = steps.between("RSQRT", steps.between("ADD", steps.between("MUL", rest, rest), steps.constant(1.0)))
    share = steps.between("MUL", steps.between("ADD", rest, steps.constant(1.0)), steps.between("MUL", root, root))
    steps.last("MUL", steps.between("MUL", steps.x, sigmoid), share)


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


def swish(lowering: Lowering, node: Node) -> None:
    """x * sigmoid(alpha * x)."""
    alpha, steps = float(node.attributes.get("alpha", 1.0)), Steps(lowering, node)
    scaled = steps.x if alpha == 1 else steps.between("MUL", steps.x, steps.constant(alpha))
    steps.last("MUL", steps.x, steps.between("LOGISTIC", scaled))


def thresholded_relu(lowering: Lowering, node: Node) -> None:
    steps, alpha = Steps(lowering, node), float(node.attributes.get("alpha", 1.0))
    threshold = steps.constant(alpha) if alpha else comparable_zero(lowering, node.outputs[0])
    above = steps.between("GREATER", steps.x, threshold, dtype=BOOL)
    steps.last("SELECT_V2", above, steps.x, steps.constant(0.0))


# --- Softmax


def softmax(lowering: Lowering, node: Node) -> None:
    """TFLite's operator runs over the last axis: another axis is moved there and back."""
    source, output = node.inputs[0], node.outputs[0]
    shape, layout = lowering.shape(source), lowering.layout(source)
    per_axis = lowering.graph.opset >= PER_AXIS_SOFTMAX_OPSET
    axis = int(node.attributes.get("axis", -1 if per_axis else 1)) % shape.rank
    if not per_axis and axis != shape.rank - 1:
        _flat_softmax(lowering, node, axis)
    elif layout is Layout.CHANNELS_LAST and axis == 1:
        _emit_softmax(lowering, node, lowering.channels_last(source), lowering.define(output, layout))
    else:
        lowering.along_last(axis, source, output, lambda x, y: _emit_softmax(lowering, node, x, y))


def _flat_softmax(lowering: Lowering, node: Node, axis: int) -> None:
    shape, output = lowering.shape(node.inputs[0]), node.outputs[0]
    if axis != 1 or -1 in shape.signature[1:]:
        raise Uncovered(
            f"axis {axis} joins axes before opset {PER_AXIS_SOFTMAX_OPSET}; "
            f"export the model with opset {PER_AXIS_SOFTMAX_OPSET} or later"
        )
    features = int(np.prod(shape.dims[1:]))
    flat_shape = BatchShape((shape.dims[0], features), (shape.signature[0], features))
    flat = [lowering.scratch(f"{output}_flat", flat_shape) for _ in range(2)]
    lowering.reshape(lowering.native(node.inputs[0]), flat_shape, flat[0])
    _emit_softmax(lowering, node, *flat)
    lowering.reshape(flat[1], shape, lowering.define(output))


def _emit_softmax(lowering: Lowering, node: Node, source: int, output: int) -> None:
    if node.op_type == "LogSoftmax":
        lowering.emit("LOG_SOFTMAX", [source], [output])
    else:
        lowering.emit("SOFTMAX", [source], [output], beta=1.0)


OPS = {
    "Celu": Op(celu),
    "Clip": Op(clip, widens=NARROW),
    "Elu": Op(elu, stays_float=True),
    "Gelu": Op(gelu),
    "HardSigmoid": Op(hard_sigmoid, sign="non_negative"),
    "HardSwish": Op(unary("HARD_SWISH")),
    "LeakyRelu": Op(leaky_relu),
    "LogSoftmax": Op(softmax),
    "Mish": Op(mish),
    "PRelu": Op(prelu, widens=NARROW),
    "Relu": Op(relu, widens=NARROW, sign="non_negative"),
    "Selu": Op(selu),
    "Sigmoid": Op(unary("LOGISTIC"), sign="non_negative"),
    "Softmax": Op(softmax, sign="non_negative"),
    "Softplus": Op(softplus, sign="non_negative"),
    "Softsign": Op(softsign, stays_float=True),
    "Swish": Op(swish),
    "Tanh": Op(unary("TANH")),
    "ThresholdedRelu": Op(thresholded_relu),
}
