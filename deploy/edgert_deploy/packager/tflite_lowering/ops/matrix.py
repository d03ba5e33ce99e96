"""Gemm and MatMul. A constant matrix becomes FULLY_CONNECTED, which has the fast INT8 kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Lowering, Uncovered, activation_code
from edgert_deploy.packager.tflite_lowering.op import Op


def gemm(lowering: Lowering, node: Node) -> None:
    """activation(alpha * A' * B' + beta * C), where ' is an optional transposition."""
    alpha, beta = (float(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    left = _matrix(lowering, node.inputs[0], bool(node.attributes.get("transA", 0)))
    output = node.outputs[0]
    if lowering.dtype(output) != FLOAT32:
        raise Uncovered(f"TFLite multiplies matrices of float32, not of {lowering.dtype(output)}; cast to float32")
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
    """Multiply. A vector operand is a matrix of one row or one column, and the result's shape omits that axis."""
    left, right = node.inputs
    output, ranks = node.outputs[0], [lowering.shape(name).rank for name in node.inputs]
    if lowering.dtype(output) != FLOAT32:
        raise Uncovered(f"TFLite multiplies matrices of float32, not of {lowering.dtype(output)}; cast to float32")
    if lowering.is_constant(right) and ranks[0] > 1 and ranks[1] == 2:
        weights = lowering.value(right, "the weights").T
        bias = np.zeros(len(weights), np.float32)
        source, keep = lowering.native(left), ranks[0] > 2
        _fully_connected(lowering, source, weights, bias, lowering.define(output), node, keep=keep)
    elif lowering.is_constant(left) and ranks[0] == 2 and ranks[1] > 1:
        _constant_left(lowering, node)
    else:
        _general(lowering, node)


def _general(lowering: Lowering, node: Node) -> None:
    """Write BATCH_MATMUL, with operands of one rank of at least two."""
    output, shapes = node.outputs[0], [lowering.shape(name) for name in node.inputs]
    result = lowering.shape(output)
    if shapes[0].rank == 1:
        shapes[0], result = shapes[0].with_axis(0, 1), result.with_axis(max(result.rank - 1, 0), 1)
    if shapes[1].rank == 1:
        shapes[1], result = shapes[1].with_axis(1, 1), result.with_axis(result.rank, 1)
    operands: list[int] = []
    for name, shape in zip(node.inputs, shapes, strict=True):
        while shape.rank < result.rank:
            shape = shape.with_axis(0, 1)
        tensor = lowering.native(name)
        if shape.rank != lowering.shape(name).rank:
            tensor = lowering.reshape(tensor, shape, lowering.scratch(f"{name}_matrix", shape))
        operands.append(tensor)
    if result.rank == lowering.shape(output).rank:
        _batched(lowering, operands, lowering.define(output))
        return
    product = lowering.scratch(f"{output}_matrix", result)
    _batched(lowering, operands, product)
    lowering.reshape(product, lowering.shape(output), lowering.define(output))


def _computed_gemm(lowering: Lowering, node: Node, left: int, alpha: float, beta: float) -> None:
    """Write a Gemm of two computed matrices."""
    right = _matrix(lowering, node.inputs[1], bool(node.attributes.get("transB", 0)))
    output, shape = node.outputs[0], lowering.shape(node.outputs[0])
    is_sum, is_scaled = bool(node.input(2)), alpha != 1
    product = lowering.scratch(f"{output}_product", shape) if is_sum or is_scaled else lowering.define(output)
    _batched(lowering, [left, right], product)
    if is_scaled:
        scaled = lowering.scratch(f"{output}_scaled", shape) if is_sum else lowering.define(output)
        product = lowering.arithmetic("MUL", [product, lowering.constant(alpha, f"{output}_alpha")], scaled)
    if is_sum:
        _add_scaled(lowering, node, product, beta)


def _constant_left(lowering: Lowering, node: Node) -> None:
    """A * X = (X' * A')', so that the constant becomes the weights of FULLY_CONNECTED."""
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


def _batched(lowering: Lowering, operands: list[int], output: int) -> None:
    lowering.emit("BATCH_MATMUL", operands, [output], adjX=False, adjY=False)


def _add_scaled(lowering: Lowering, node: Node, product: int, beta: float) -> None:
    """Add beta * C, where C is computed or a whole matrix."""
    addend = node.inputs[2]
    label = f"{node.outputs[0]}_addend"
    if lowering.is_constant(addend):
        tensor = lowering.constant(lowering.value(addend, "C") * np.float32(beta), label)
    else:
        tensor = lowering.native(addend)
        if beta != 1:
            scaled = lowering.scratch(label, lowering.shape(addend))
            tensor = lowering.arithmetic("MUL", [tensor, lowering.constant(beta, label)], scaled)
    lowering.arithmetic("ADD", [product, tensor], lowering.define(node.outputs[0]), node.activation)


def _matrix(lowering: Lowering, name: str, transposed: bool) -> int:
    tensor = lowering.native(name)
    if not transposed:
        return tensor
    shape: BatchShape = lowering.shape(name).permuted((1, 0))
    return lowering.transpose(tensor, (1, 0), lowering.scratch(f"{name}_transposed", shape, lowering.dtype(name)))


OPS = {"Gemm": Op(gemm, clamps=True), "MatMul": Op(matmul, clamps=True)}
