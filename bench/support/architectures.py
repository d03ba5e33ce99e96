"""Models of the usual sizes, written node by node with random weights: their answers mean nothing, their cost is real.

Weights are drawn so that values neither grow nor vanish (He et al., 2015). BatchNormalization is folded into the
convolutions, as exporters do. The same name gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

OPSET = 17
IR_VERSION = 8
# Sandler et al., 2018, table 2: expansion, channels, repeats, stride.
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# He et al., 2016, table 1: channels, repeats, stride.
RESNET_50 = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))

CENTRED_ON = 32  # samples for the mean answer, which is subtracted


class Graph:
    """A graph under construction; a method adds a layer after a value and returns its output's name."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self._random = np.random.default_rng(seed)

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        from onnx import helper

        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attributes))
        return name

    def constant(self, array: NDArray[Any]) -> str:
        from onnx import numpy_helper

        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return str(self.weights[-1].name)

    def random(self, *shape: int, std: float) -> str:
        """Return weights [outputs, ...] or a bias [outputs].

        The weights of one output add up to 0 where there are several: values after a ReLU are positive, and other
        weights would pass on their mean, the same for every sample.
        """
        values = self._random.standard_normal(shape) * std
        if values.ndim == 4 and shape[1] > 1:
            values -= values.mean(axis=(1, 2, 3), keepdims=True)
        return self.constant(values.astype(np.float32))

    def conv(
        self, x: str, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, gain: float = 2.0
    ) -> str:
        fan_in = inputs // groups * kernel * kernel
        weight = self.random(outputs, inputs // groups, kernel, kernel, std=(gain / fan_in) ** 0.5)
        pads = [(kernel - 1) // 2] * 4
        shape = {"kernel_shape": [kernel, kernel], "strides": [stride, stride], "pads": pads, "group": groups}
        return self.add("Conv", [x, weight, self.random(outputs, std=0.05)], **shape)

    def relu6(self, x: str) -> str:
        return self.add("Clip", [x, self.constant(np.array(0, np.float32)), self.constant(np.array(6, np.float32))])

    def gemm(self, x: str, inputs: int, outputs: int) -> str:
        return self.add("Gemm", [x, self.random(inputs, outputs, std=inputs**-0.5), self.random(outputs, std=0.05)])

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        product = self.add("MatMul", [x, self.random(inputs, outputs, std=inputs**-0.5)])
        return self.add("Add", [product, self.random(outputs, std=0.05)])

    def norm(self, x: str, width: int) -> str:
        return self.add(
            "LayerNormalization", [x, self.constant(np.ones(width, np.float32)), self.random(width, std=0.05)]
        )

    def model(self, shape: Sequence[int], output: str, classes: int) -> Any:
        from onnx import TensorProto, helper

        self.nodes.append(helper.make_node("Identity", [output], ["scores"], "scores"))
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *shape])
        y = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", classes])
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)


def mobilenet_v2(side: int = 224, classes: int = 1000) -> Any:
    graph, channels = Graph(2), 32
    x = graph.relu6(graph.conv("x", 3, 32, 3, stride=2))
    for expansion, outputs, repeats, stride in MOBILENET_V2:
        for i in range(repeats):
            x = _inverted_residual(graph, x, channels, outputs, expansion, stride if i == 0 else 1)
            channels = outputs
    x = graph.relu6(graph.conv(x, channels, 1280, 1))
    x = graph.add("Flatten", [graph.add("GlobalAveragePool", [x])])
    return graph.model((3, side, side), graph.gemm(x, 1280, classes), classes)


def _inverted_residual(graph: Graph, x: str, inputs: int, outputs: int, expansion: int, stride: int) -> str:
    wide = inputs * expansion
    y = x if expansion == 1 else graph.relu6(graph.conv(x, inputs, wide, 1))
    y = graph.relu6(graph.conv(y, wide, wide, 3, stride, groups=wide))
    y = graph.conv(y, wide, outputs, 1, gain=1.0)
    return graph.add("Add", [x, y]) if stride == 1 and inputs == outputs else y


def mlp(inputs: int = 256, width: int = 256, classes: int = 10) -> Any:
    """Return two fully connected layers over [N, inputs], as for a few sensor values."""
    graph = Graph(1)
    return graph.model(
        (inputs,), graph.gemm(graph.add("Relu", [graph.gemm("x", inputs, width)]), width, classes), classes
    )


def cnn(side: int = 96, classes: int = 10) -> Any:
    """Return four plain convolutions over an image, as teams write their first one."""
    graph, channels, x = Graph(3), 3, "x"
    for outputs in (16, 32, 64, 128):
        x = graph.add("Relu", [graph.conv(x, channels, outputs, 3, stride=1 if channels == 3 else 2)])
        channels = outputs
    x = graph.add("Flatten", [graph.add("GlobalAveragePool", [x])])
    return graph.model((3, side, side), graph.gemm(x, channels, classes), classes)


def resnet_50(side: int = 224, classes: int = 1000) -> Any:
    graph, channels = Graph(50), 64
    x = graph.add("Relu", [graph.conv("x", 3, 64, 7, stride=2)])
    x = graph.add("MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for width, repeats, stride in RESNET_50:
        for i in range(repeats):
            x = _bottleneck(graph, x, channels, width, stride if i == 0 else 1)
            channels = 4 * width
    x = graph.add("Flatten", [graph.add("GlobalAveragePool", [x])])
    return graph.model((3, side, side), graph.gemm(x, channels, classes), classes)


def _bottleneck(graph: Graph, x: str, inputs: int, width: int, stride: int) -> str:
    y = graph.add("Relu", [graph.conv(x, inputs, width, 1)])
    y = graph.add("Relu", [graph.conv(y, width, width, 3, stride)])
    y = graph.conv(y, width, 4 * width, 1, gain=0.5)
    around = x if inputs == 4 * width else graph.conv(x, inputs, 4 * width, 1, stride, gain=1.0)
    return graph.add("Relu", [graph.add("Add", [y, around])])


def encoder(layers: int = 4, tokens: int = 128, width: int = 256, heads: int = 4, classes: int = 10) -> Any:
    """Return a transformer encoder over embedded tokens [N, tokens, width] that classifies their mean."""
    graph, x = Graph(4), "x"
    for _ in range(layers):
        x = graph.add("Add", [x, _attention(graph, graph.norm(x, width), tokens, width, heads)])
        hidden = graph.linear(graph.norm(x, width), width, 4 * width)
        x = graph.add("Add", [x, graph.linear(_gelu(graph, hidden), 4 * width, width)])
    x = graph.add("ReduceMean", [graph.norm(x, width)], axes=[1], keepdims=0)
    return graph.model((tokens, width), graph.gemm(x, width, classes), classes)


def _attention(graph: Graph, x: str, tokens: int, width: int, heads: int) -> str:
    shape = graph.constant(np.array([-1, tokens, heads, width // heads], np.int64))

    def split(value: str, axes: list[int]) -> str:
        return graph.add("Transpose", [graph.add("Reshape", [value, shape])], perm=axes)

    query, key, value = (graph.linear(x, width, width) for _ in range(3))
    scores = graph.add("MatMul", [split(query, [0, 2, 1, 3]), split(key, [0, 2, 3, 1])])
    scaled = graph.add("Mul", [scores, graph.constant(np.array((width // heads) ** -0.5, np.float32))])
    mixed = graph.add("MatMul", [graph.add("Softmax", [scaled], axis=-1), split(value, [0, 2, 1, 3])])
    joined = graph.add("Transpose", [mixed], perm=[0, 2, 1, 3])
    whole = graph.constant(np.array([-1, tokens, width], np.int64))
    return graph.linear(graph.add("Reshape", [joined, whole]), width, width)


def _gelu(graph: Graph, x: str) -> str:
    half, root, one = (graph.constant(np.array(value, np.float32)) for value in (0.5, 2**-0.5, 1.0))
    error = graph.add("Erf", [graph.add("Mul", [x, root])])
    return graph.add("Mul", [graph.add("Mul", [x, half]), graph.add("Add", [error, one])])


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "mlp": mlp,
    "cnn": cnn,
    "mobilenet_v2": mobilenet_v2,
    "resnet_50": resnet_50,
    "encoder": encoder,
}


def write_model(name: str, folder: Path, calibration: int = 32, holdout: int = 64) -> tuple[Path, Path, Path]:
    """Write the model, calibration and hold-out into `folder`; samples are noise, in blotches for images.

    The last bias subtracts the mean answer: a random network answers nearly the same to every input, and only the
    rest is compared.
    """
    proto = ARCHITECTURES[name]()
    _centre(proto)
    paths = folder / f"{name}.onnx", folder / f"{name}-calibration.npz", folder / f"{name}-holdout.npz"
    paths[0].write_bytes(proto.SerializeToString(deterministic=True))
    shape = item_shape(proto)
    for seed, (path, count) in enumerate(zip(paths[1:], (calibration, holdout), strict=True)):
        np.savez(path, x=samples(shape, count, seed))
    return paths


def item_shape(proto: Any) -> list[int]:
    """Return the shape of one item of the model's input."""
    return [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim[1:]]


def _centre(proto: Any) -> None:
    import onnxruntime
    from onnx import numpy_helper

    session = onnxruntime.InferenceSession(proto.SerializeToString())
    (answers,) = session.run(None, {"x": samples(item_shape(proto), CENTRED_ON, seed=99)})
    gemm = next(node for node in reversed(proto.graph.node) if node.op_type == "Gemm")
    bias = next(tensor for tensor in proto.graph.initializer if tensor.name == gemm.input[2])
    bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) - answers.mean(axis=0), bias.name))


def samples(shape: Sequence[int], count: int, seed: int) -> NDArray[np.float32]:
    """Return noise of mean 0 and deviation 1; images are blotches of several sizes."""
    random = np.random.default_rng(seed)
    if len(shape) != 3:
        return random.standard_normal((count, *shape)).astype(np.float32)
    channels, height, width = shape
    image = np.zeros((count, channels, height, width))
    for cell in (1, 8, 32):
        coarse = random.standard_normal((count, channels, -(-height // cell), -(-width // cell)))
        image += coarse.repeat(cell, axis=2).repeat(cell, axis=3)[:, :, :height, :width]
    return (image / 3**0.5).astype(np.float32)
