"""A small convolutional network over time, in NumPy: its answers, its training, its ONNX file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]

BANDS, FRAMES, CLASSES = 32, 51, 5
LAYERS = ((40, 5, 2), (40, 5, 2), (40, 5, 1))  # channels, length and stride of each convolution
EPOCHS, BATCH, LEARNING_RATE = 9, 64, 2e-3


class Network:
    """Convolutions with ReLU, the largest value over time, and a linear layer.

    `weights` contains the weights and then the biases of each layer, in the order of the layers.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self.weights: list[Array] = []
        channels = BANDS
        for count, length, _ in LAYERS:
            self.weights += [
                random.normal(0, np.sqrt(2 / (channels * length)), (count, channels, length)),
                np.zeros(count),
            ]
            channels = count
        self.weights += [random.normal(0, np.sqrt(1 / channels), (CLASSES, channels)), np.zeros(CLASSES)]
        self.weights = [w.astype(np.float32) for w in self.weights]

    def scores(self, inputs: Array) -> Array:
        """Return the scores [N, CLASSES] for features [N, BANDS, 1, FRAMES]."""
        return self._forward(inputs[:, :, 0])[1]

    def gradients(self, inputs: Array, labels: Array) -> list[Array]:
        """Return the gradient of the mean cross-entropy for each of `weights`."""
        layers, scores = self._forward(inputs[:, :, 0])
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        chances[np.arange(len(labels)), labels] -= 1
        chances /= len(labels)
        last = layers[-1][1]
        best = last.argmax(axis=1)[:, None]
        found = [chances.T @ np.take_along_axis(last, best, axis=1)[:, 0], chances.sum(axis=0)]
        slope = np.zeros_like(last)
        np.put_along_axis(slope, best, (chances @ self.weights[-2])[:, None], axis=1)
        for i in reversed(range(len(LAYERS))):
            (count, length, stride), (seen, made), w = LAYERS[i], layers[i], self.weights[2 * i]
            slope = slope * (made > 0)
            flat = slope.reshape(-1, count)
            found = [(flat.T @ seen.reshape(len(flat), -1)).reshape(w.shape), flat.sum(axis=0), *found]
            parts = (flat @ w.reshape(count, -1)).reshape(*slope.shape[:2], w.shape[1], length)
            frames = FRAMES if i == 0 else layers[i - 1][1].shape[1]
            slope = np.zeros((len(slope), frames, w.shape[1]), np.float32)
            for k in range(length):
                slope[:, k : k + stride * parts.shape[1] : stride] += parts[..., k]
        return found

    def _forward(self, x: Array) -> tuple[list[tuple[Array, Array]], Array]:
        """Return the input and output of each convolution, both [N, steps, ...], and the scores."""
        layers: list[tuple[Array, Array]] = []
        for i, (count, length, stride) in enumerate(LAYERS):
            windows = sliding_window_view(x, length, axis=2)[:, :, ::stride]
            seen = windows.transpose(0, 2, 1, 3).reshape(len(x), windows.shape[2], -1)
            made: Array = np.maximum(seen @ self.weights[2 * i].reshape(count, -1).T + self.weights[2 * i + 1], 0)
            layers.append((seen, made))
            x = made.transpose(0, 2, 1)
        return layers, made.max(axis=1) @ self.weights[-2].T + self.weights[-1]


def train(inputs: Array, labels: Array, random: np.random.Generator) -> Network:
    """Minimise the cross-entropy by Adam (Kingma and Ba 2015), with a learning rate that falls to 0."""
    network = Network(random)
    first, second = ([np.zeros_like(w) for w in network.weights] for _ in range(2))
    step, steps = 0, EPOCHS * (len(inputs) // BATCH)
    for epoch in range(EPOCHS):
        order = random.permutation(len(inputs))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            picked = order[start : start + BATCH]
            step += 1
            rate = LEARNING_RATE * (1 - step / (steps + 1))
            for i, slope in enumerate(network.gradients(inputs[picked], labels[picked])):
                first[i] = 0.9 * first[i] + 0.1 * slope
                second[i] = 0.999 * second[i] + 0.001 * slope**2
                size = np.sqrt(second[i] / (1 - 0.999**step)) + 1e-8
                network.weights[i] = (network.weights[i] - rate * first[i] / (1 - 0.9**step) / size).astype(np.float32)
        print(f"epoch {epoch + 1} of {EPOCHS}", file=sys.stderr)
    return network


def write_onnx(network: Network, path: Path) -> None:
    """Write the network with two-dimensional convolutions of height 1, for which all engines have kernels."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = {f"w{i}": w.astype(np.float32) for i, w in enumerate(network.weights)}
    nodes, last, frames = [], "features", FRAMES
    for i, (_, length, stride) in enumerate(LAYERS):
        weights[f"w{2 * i}"] = weights[f"w{2 * i}"][:, :, None]
        inputs = [last, f"w{2 * i}", f"w{2 * i + 1}"]
        nodes.append(helper.make_node("Conv", inputs, [f"conv{i}"], kernel_shape=[1, length], strides=[1, stride]))
        nodes.append(helper.make_node("Relu", [f"conv{i}"], [f"relu{i}"]))
        last, frames = f"relu{i}", (frames - length) // stride + 1
    count = len(network.weights)
    nodes += [
        helper.make_node("MaxPool", [last], ["pool"], kernel_shape=[1, frames]),
        helper.make_node("Flatten", ["pool"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", f"w{count - 2}", f"w{count - 1}"], ["scores"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "keyword",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", BANDS, 1, FRAMES])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(w, name) for name, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="edgert")
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
