"""Train the example model: a small convolutional network on scikit-learn's handwritten digits.

The script writes into its own folder: `digits.onnx` (FP32, open batch axis), `calibration.npz` (a part of
the training images), `holdout.npz` (never trained on), `seven.npy` (one image of the hold-out as UINT8),
`labels.txt` and `preprocess.toml`. It trains with NumPy alone and takes about half a minute. The same seed
gives the same model on the same machine.

    python examples/digits/train.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]

HERE = Path(__file__).parent
SEED = 7
EPOCHS = 40
BATCH = 64
LEARNING_RATE = 2e-3
HOLDOUT = 400
CALIBRATION = 300
ACCURACY_MIN = 0.98
PREPROCESS = """\
# Pixels of the images range from 0 to 16; the model takes 0 to 1.
input = "image"
scale = 0.0625
mean = [0.0]
std = [1.0]
layout = "model"
"""


def main() -> int:
    images, labels = load_digits()
    order = np.random.default_rng(SEED).permutation(len(images))
    held, trained = order[:HOLDOUT], order[HOLDOUT:]
    network = train(images[trained], labels[trained])
    accuracy = float((network.scores(images[held]).argmax(axis=1) == labels[held]).mean())
    print(f"hold-out accuracy {accuracy:.4f} on {HOLDOUT} digits")
    if accuracy < ACCURACY_MIN:
        print(f"below {ACCURACY_MIN}: no file was written", file=sys.stderr)
        return 1
    write_onnx(network, HERE / "digits.onnx")
    calibrating = trained[:CALIBRATION]
    np.savez_compressed(HERE / "calibration.npz", image=images[calibrating], labels=labels[calibrating])
    np.savez_compressed(HERE / "holdout.npz", image=images[held], labels=labels[held])
    seven = images[held][labels[held] == 7][0]
    np.save(HERE / "seven.npy", (seven * 16).astype(np.uint8))
    (HERE / "labels.txt").write_text("".join(f"{digit}\n" for digit in range(10)))
    (HERE / "preprocess.toml").write_text(PREPROCESS)
    return 0


def load_digits() -> tuple[Array, Array]:
    """Return 1,797 images FP32 [N, 1, 8, 8] with values 0 to 1, and their digits INT64 [N]."""
    from sklearn import datasets

    digits = datasets.load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)


@dataclass
class Network:
    """conv 3x3 (1 -> 16) relu, conv 3x3 (16 -> 32) relu, max-pool 2x2, fully connected (512 -> 10)."""

    weights: dict[str, Array]
    kept: dict[str, Array] = field(default_factory=dict)  # values of the forward pass that the backward pass needs

    @classmethod
    def random(cls, random: np.random.Generator) -> Network:
        def he(*shape: int) -> Array:
            kernel: Array = random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
            return kernel.astype(np.float32)

        weights = {"w1": he(16, 1, 3, 3), "w2": he(32, 16, 3, 3), "w3": he(10, 512)}
        biases = {"b1": 16, "b2": 32, "b3": 10}
        return cls({**weights, **{name: np.zeros(n, np.float32) for name, n in biases.items()}})

    def scores(self, images: Array) -> Array:
        w, k = self.weights, self.kept
        k["columns1"] = columns(images)
        k["relu1"] = np.maximum(convolve(k["columns1"], w["w1"], w["b1"]), 0)
        k["columns2"] = columns(k["relu1"])
        k["relu2"] = np.maximum(convolve(k["columns2"], w["w2"], w["b2"]), 0)
        windows = pool_windows(k["relu2"])
        k["winner"] = windows.argmax(axis=-1)
        k["features"] = windows.max(axis=-1).reshape(len(images), -1)
        scores: Array = k["features"] @ w["w3"].T + w["b3"]
        return scores

    def gradients(self, slope: Array) -> dict[str, Array]:
        """Return the gradient of the loss for every weight; `slope` is its gradient for the last scores."""
        w, k = self.weights, self.kept
        grads = {"w3": slope.T @ k["features"], "b3": slope.sum(axis=0)}
        pooled = (slope @ w["w3"]).reshape(k["winner"].shape)
        back = unpool(pooled, k["winner"]) * (k["relu2"] > 0)
        grads["w2"], grads["b2"] = by_kernel(back, k["columns2"], w["w2"].shape), back.sum(axis=(0, 2, 3))
        turned = w["w2"][:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
        back = convolve(columns(back), turned, np.float32(0)) * (k["relu1"] > 0)
        grads["w1"], grads["b1"] = by_kernel(back, k["columns1"], w["w1"].shape), back.sum(axis=(0, 2, 3))
        return grads


def columns(images: Array) -> Array:
    """Return the zero-padded 3x3 neighbourhood of every pixel: [N, C, H, W] -> [N, H, W, C * 9]."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    patches: Array = sliding_window_view(padded, window_shape=(3, 3), axis=(2, 3))  # type: ignore[call-overload,unused-ignore]  # NumPy 2.2
    windows = patches.transpose(0, 2, 3, 1, 4, 5)
    flat: Array = windows.reshape(*windows.shape[:3], -1)
    return flat


def convolve(surroundings: Array, kernel: Array, bias: Any) -> Array:
    answer: Array = (surroundings @ kernel.reshape(len(kernel), -1).T + bias).transpose(0, 3, 1, 2)
    return answer


def by_kernel(back: Array, surroundings: Array, shape: tuple[int, ...]) -> Array:
    by_channel = back.transpose(1, 0, 2, 3).reshape(back.shape[1], -1)
    grad: Array = (by_channel @ surroundings.reshape(-1, surroundings.shape[-1])).reshape(shape)
    return grad


def pool_windows(x: Array) -> Array:
    """Return the pixels of each pooling window: [N, C, H, W] -> [N, C, H/2, W/2, 4]."""
    n, c, h, w = x.shape
    tiles = x.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5)
    windows: Array = tiles.reshape(n, c, h // 2, w // 2, 4)
    return windows


def unpool(back: Array, winner: Array) -> Array:
    n, c, h, w = winner.shape
    spread = ((np.arange(4) == winner[..., None]) * back[..., None]).reshape(n, c, h, w, 2, 2)
    images: Array = spread.transpose(0, 1, 2, 4, 3, 5).reshape(n, c, 2 * h, 2 * w)
    return images


def train(images: Array, labels: Array) -> Network:
    """Minimise the cross-entropy by Adam (Kingma and Ba 2015), each image shifted by up to one pixel."""
    random = np.random.default_rng(SEED)
    network = Network.random(random)
    first = {name: np.zeros_like(w) for name, w in network.weights.items()}
    second = {name: np.zeros_like(w) for name, w in network.weights.items()}
    step, steps = 0, EPOCHS * (len(images) // BATCH)
    for epoch in range(EPOCHS):
        order = random.permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            picked = order[start : start + BATCH]
            scores = network.scores(shifted(images[picked], random))
            grads = network.gradients(cross_entropy_slope(scores, labels[picked]))
            step += 1
            rate = LEARNING_RATE * (1 - step / (steps + 1))
            for name, grad in grads.items():
                first[name] = 0.9 * first[name] + 0.1 * grad
                second[name] = 0.999 * second[name] + 0.001 * grad**2
                update = first[name] / (1 - 0.9**step) / (np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8)
                network.weights[name] = (network.weights[name] - rate * update).astype(np.float32)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1} of {EPOCHS}", file=sys.stderr)
    return network


def shifted(images: Array, random: np.random.Generator) -> Array:
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    corners = random.integers(0, 3, (len(images), 2))
    return np.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, corners, strict=True)])


def cross_entropy_slope(scores: Array, labels: Array) -> Array:
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(labels)), labels] -= 1
    slope: Array = (chances / len(labels)).astype(np.float32)
    return slope


def write_onnx(network: Network, path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    conv = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["conv1"], "conv1", **conv),
        helper.make_node("Relu", ["conv1"], ["relu1"], "relu1"),
        helper.make_node("Conv", ["relu1", "w2", "b2"], ["conv2"], "conv2", **conv),
        helper.make_node("Relu", ["conv2"], ["relu2"], "relu2"),
        helper.make_node("MaxPool", ["relu2"], ["pool"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pool"], ["features"], "flatten", axis=1),
        helper.make_node("Gemm", ["features", "w3", "b3"], ["scores"], "classify", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(weight, name) for name, weight in network.weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="edgert")
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    sys.exit(main())
