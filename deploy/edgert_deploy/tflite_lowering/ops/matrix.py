"""Gemm and MatMul. A constant matrix becomes FULLY_CONNECTED, whose INT8 kernel is the fast one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.tflite_lowering.lowering import Lowering, Uncovered, activation_code


def gemm(lowering: Lowering, node: Node) -> None:
    """activation(alpha * A' * B' + beta * C), where ' may transpose."""
    alpha, beta = (float(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    left = _matrix(lowering, node.inputs[0], bool(node.attributes.get("transA", 0)))
    output = node.outputs[0]
    if not lowering.is_constant(node.inputs[1]):
        _computed_gemm(lowering, node, left, alpha, beta)
        return
    weights = lowering.value(node.inputs[1], "the weights") * np.float32(alpha)
    weights = weights if node.attributes.get("transB", 0) else weights.T
    addend = lowering.graph.constants.get(node.input(2))
    if not node.input(2):
        addend = np.zeros(1, np.float32)
    if addend is not None and (addend.ndim < 2 or addend.shape[0] == 1):
        bias = np.broadcast_to(addend.reshape(-1) * np.float32(beta), (len(weights),))
        _fully_connected(lowering, left, weights, bias, lowering.define(output), node, keep=False)
        return
    product = lowering.scratch(f"{output}_product", lowering.shape(output))
    plain = Node(node.op_type, node.domain, node.name, node.inputs, node.outputs)
    _fully_connected(lowering, left, weights, np.zeros(len(weights), np.float32), product, plain, keep=False)
    _add_scaled(lowering, node, product, beta)


def matmul(lowering: Lowering, node: Node) -> None:
    left, right = node.inputs
    if 1 in (lowering.shape(left).rank, lowering.shape(right).rank):
        raise Uncovered("a vector operand is not covered; give it a second axis")
    if lowering.is_constant(right) and lowering.shape(right).rank == 2:
        weights = lowering.value(right, "the weights").T
        bias, keep = np.zeros(len(weights), np.float32), lowering.shape(left).rank > 2
        _fully_connected(
            lowering, lowering.native(left), weights, bias, lowering.define(node.outputs[0]), node, keep=keep
        )
    elif lowering.is_constant(left) and lowering.shape(left).rank == 2:
        _constant_left(lowering, node)
    else:
        _batched(lowering, lowering.native(left), lowering.native(right), lowering.define(node.outputs[0]))


def _computed_gemm(lowering: Lowering, node: Node, left: int, alpha: float, beta: float) -> None:
    """Gemm of two computed matrices."""
    if alpha != 1:
        raise Uncovered(f"alpha {alpha} on two computed matrices is not covered")
    right = _matrix(lowering, node.inputs[1], bool(node.attributes.get("transB", 0)))
    output = node.outputs[0]
    if not node.input(2):
        _batched(lowering, left, right, lowering.define(output))
        return
    product = lowering.scratch(f"{output}_product", lowering.shape(output))
    _batched(lowering, left, right, product)
    _add_scaled(lowering, node, product, beta)


def _constant_left(lowering: Lowering, node: Node) -> None:
    """A * X = (X' * A')': the constant is on the side that FULLY_CONNECTED has its weights on."""
    weights = lowering.value(node.inputs[0], "the weights")
    output, rank = node.outputs[0], lowering.shape(node.inputs[1]).rank
    swap = (*range(rank - 2), rank - 1, rank - 2)
    turned_shape, product_shape = (lowering.shape(name).permuted(swap) for name in (node.inputs[1], output))
    turned = lowering.scratch(f"{output}_turned", turned_shape)
    lowering.transpose(lowering.native(node.inputs[1]), swap, turned)
    product = lowering.scratch(f"{output}_product", product_shape)
    bias = np.zeros(len(weights), np.float32)
    _fully_connected(lowering, turned, weights, bias, product, node, keep=rank > 2, reordered=False)
    lowering.transpose(product, swap, lowering.define(output))


def _fully_connected(
    lowering: Lowering,
    source: int,
    weights: NDArray[Any],
    bias: NDArray[Any],
    output: int,
    node: Node,
    *,
    keep: bool,
    reordered: bool = True,
) -> None:
    """`weights` are [outputs, inputs]."""
    if reordered and node.inputs[0] in lowering.feature_order:
        weights = weights[:, lowering.feature_order[node.inputs[0]]]
    name = node.outputs[0]
    inputs = [source, lowering.constant(weights, f"{name}_weights"), lowering.constant(bias, f"{name}_bias")]
    activation = activation_code(node.activation)
    lowering.emit("FULLY_CONNECTED", inputs, [output], keepNumDims=keep, fusedActivationFunction=activation)


def _batched(lowering: Lowering, left: int, right: int, output: int) -> None:
    lowering.emit("BATCH_MATMUL", [left, right], [output], adjX=False, adjY=False)


def _add_scaled(lowering: Lowering, node: Node, product: int, beta: float) -> None:
    """Add beta * C, where C is computed or a whole matrix."""
    addend = node.inputs[2]
    if lowering.is_constant(addend):
        scaled = lowering.value(addend, "C") * np.float32(beta)
        tensor = lowering.constant(scaled, f"{node.outputs[0]}_addend")
    elif beta == 1:
        tensor = lowering.native(addend)
    else:
        raise Uncovered(f"beta {beta} on a computed C is not covered")
    lowering.arithmetic("ADD", [product, tensor], lowering.define(node.outputs[0]), node.activation)


def _matrix(lowering: Lowering, name: str, transposed: bool) -> int:
    tensor = lowering.native(name)
    if not transposed:
        return tensor
    shape: BatchShape = lowering.shape(name).permuted((1, 0))
    return lowering.transpose(tensor, (1, 0), lowering.scratch(f"{name}_transposed", shape, lowering.dtype(name)))


LOWERINGS = {
    "Gemm": gemm,
    "MatMul": matmul,
}
