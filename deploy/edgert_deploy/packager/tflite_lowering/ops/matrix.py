"""Gemm, MatMul and DFT. A constant matrix becomes FULLY_CONNECTED, which has the fast INT8 kernel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, Unsupported, Value, require_fixed

WAVES_MAX = 20_000_000  # the weights of a Fourier transform: 80 MB


def gemm(lowering: Lowering, node: Node) -> None:
    """Compute activation(alpha * A' * B' + beta * C), where ' is an optional transposition."""
    _check_dtype(lowering, node)
    alpha, beta = (float(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    left = _matrix(lowering, node, 0, "transA")
    addend = lowering.graph.constants.get(node.input(2))
    if lowering.is_constant(node.inputs[1]):
        weights = lowering.value(node.inputs[1], "the weights") * np.float32(alpha)
        weights = _in_order(lowering, node, weights if node.attributes.get("transB", 0) else weights.T)
        if not node.input(2):
            addend = np.zeros(1, np.float32)
        if addend is not None and (addend.ndim < 2 or addend.shape[0] == 1):
            bias = np.broadcast_to(addend.reshape(-1) * np.float32(beta), (len(weights),))
            lowering.result(node, left.times_weights(weights, bias, node.activation))
            return
        product = left.times_weights(weights)
    else:
        right = _matrix(lowering, node, 1, "transB")
        product = left.op("BATCH_MATMUL", right, shape=lowering.shape(node.outputs[0]))
        product = product if alpha == 1 else product * alpha
    if node.input(2):  # C is computed, or is a whole matrix
        if addend is not None:
            scaled = product.constant(lowering.value(node.inputs[2], "C") * np.float32(beta))
        else:
            scaled = lowering.read(node, 2) if beta == 1 else lowering.read(node, 2) * beta
        product = product.binary("ADD", scaled, activation=node.activation)
    lowering.result(node, product)


def matmul(lowering: Lowering, node: Node) -> None:
    """Multiply two matrices. A vector counts as one row or column, and the result omits this axis."""
    _check_dtype(lowering, node)
    left, right = node.inputs
    ranks = [lowering.shape(name).rank for name in node.inputs]
    if lowering.is_constant(right) and ranks[0] > 1 and ranks[1] == 2:
        weights = _in_order(lowering, node, lowering.value(right, "the weights").T)
        lowering.result(node, lowering.read(node).times_weights(weights, activation=node.activation))
    elif lowering.is_constant(left) and ranks[0] == 2 and ranks[1] > 1:
        # A * X is written as (X' * A')', so that the constant A becomes the weights of FULLY_CONNECTED.
        swap = (*range(ranks[1] - 2), ranks[1] - 1, ranks[1] - 2)
        turned = lowering.read(node, 1).transposed(swap)
        product = turned.times_weights(lowering.value(left, "the weights"), activation=node.activation)
        lowering.result(node, product.transposed(swap))
    else:
        lowering.result(node, _general(lowering, node))


def dft(lowering: Lowering, node: Node) -> None:
    """Multiply the signal, with its real and imaginary parts, by the matrix of its Fourier transform."""
    _check_dtype(lowering, node)
    x, shape = lowering.read(node), lowering.shape(node.outputs[0])
    axis = node.axis(shape.rank, default=1 if lowering.graph.opset < 20 else -2)
    if node.input(2):
        axis = int(lowering.value(node.inputs[2], "the axis")) % shape.rank
    require_fixed(x.shape, [axis], "it transforms the batch")
    given, wanted = ((one.dims[axis], one.dims[-1]) for one in (x.shape, shape))
    weights = math.prod((*given, *wanted))
    if weights > WAVES_MAX:
        raise Unsupported(f"its matrix would have {weights} weights, at most {WAVES_MAX}; export shorter frames")
    length = next(iter(lowering.integers(node, "dft_length", 1) or ()), None)
    signals = np.eye(math.prod(given)).reshape(-1, *given) @ np.array([1, 1j])[: given[1]]
    backward = np.fft.ifft if wanted[1] == 2 else np.fft.irfft
    spectra = (backward if node.attributes.get("inverse", 0) else np.fft.fft)(signals, length)[:, : wanted[0]]
    matrix = np.stack([spectra.real, spectra.imag], axis=-1)[..., : wanted[1]].reshape(len(signals), -1)
    last = shape.rank - 1
    order = [*(i for i in range(last) if i != axis), axis, last]
    x = x.transposed(order)
    rows = x.shape.reduced([last], keep=False).with_length(last - 1, math.prod(given))
    product = x.reshaped(rows).times_weights(matrix.T)
    spectrum = product.reshaped(x.shape.with_lengths({last - 1: wanted[0], last: wanted[1]}))
    lowering.result(node, spectrum.transposed(np.argsort(order).tolist()))


def _general(lowering: Lowering, node: Node) -> Value:
    """Write BATCH_MATMUL. Both operands get the same rank, at least two."""
    left, right = lowering.read(node, 0), lowering.read(node, 1)
    result = wanted = lowering.shape(node.outputs[0])
    shapes = [left.shape, right.shape]
    if left.shape.rank == 1:
        shapes[0], result = shapes[0].with_axis(0, 1), result.with_axis(max(result.rank - 1, 0), 1)
    if right.shape.rank == 1:
        shapes[1], result = shapes[1].with_axis(1, 1), result.with_axis(result.rank, 1)
    left, right = (x.reshaped(shape.of_rank(result.rank)) for x, shape in zip((left, right), shapes, strict=True))
    return left.op("BATCH_MATMUL", right, shape=result).reshaped(wanted)


def _check_dtype(lowering: Lowering, node: Node) -> None:
    if (dtype := lowering.dtype(node.outputs[0])) != FLOAT32:
        raise Unsupported(f"TFLite multiplies matrices of float32, not of {dtype}; cast to float32")


def _in_order(lowering: Lowering, node: Node, weights: NDArray[Any]) -> NDArray[Any]:
    """Return weights [outputs, inputs] in the order of the features of the node's first input."""
    order = lowering.feature_order.get(node.inputs[0])
    return weights if order is None else weights[:, order]


def _matrix(lowering: Lowering, node: Node, index: int, attribute: str) -> Value:
    matrix = lowering.read(node, index)
    return matrix.transposed((1, 0)) if node.attributes.get(attribute, 0) else matrix


OPS = {"DFT": Op(dft), "Gemm": Op(gemm, clamps=True), "MatMul": Op(matmul, clamps=True)}
