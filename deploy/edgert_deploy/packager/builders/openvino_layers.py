"""The layers of an OpenVINO IR: the precision and the multiply-accumulates of each."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer, product

CONVOLUTIONS = frozenset(["Convolution", "GroupConvolution"])
BACKWARD = frozenset(["ConvolutionBackpropData", "GroupConvolutionBackpropData"])
# The positions of a recurrent layer's inputs that hold the weights of its data and the weights of its state.
RECURRENT = {
    "GRUCell": (2, 3),
    "GRUSequence": (3, 4),
    "LSTMCell": (3, 4),
    "LSTMSequence": (4, 5),
    "RNNCell": (2, 3),
    "RNNSequence": (3, 4),
}
WEIGHTED = CONVOLUTIONS | BACKWARD | frozenset(RECURRENT) | {"MatMul"}
# `openvino_layers` yields these kinds of layer. Other kinds are fused, or are arithmetic on shapes and weights.
COMPUTES = WEIGHTED | {"AvgPool", "Gelu", "Interpolate", "MVN", "MaxPool", "ReduceMean", "SoftMax", "Softmax"}
# OpenVINO moves a FakeQuantize across these operators to the layer that reads their result.
MOVES = frozenset(
    ["BatchToSpace", "Broadcast", "Clamp", "Concat", "DepthToSpace", "Gather", "MaxPool", "Pad", "ReLU", "Reshape"]
    + ["ShuffleChannels", "Slice", "SpaceToBatch", "Split", "Squeeze", "StridedSlice", "Transpose", "Unsqueeze"]
    + ["VariadicSplit"]
)
# The operators that convert the weights in a file to the numbers that they represent.
UNPACKS = frozenset(["Convert", "Multiply", "Reshape", "Subtract", "Transpose"])
INT8_TYPES = ("i8", "u8")
LEVELS_MAX = 256  # the maximum number of levels of a FakeQuantize to 8 bits


def openvino_layers(path: Path) -> Iterator[ArtifactLayer]:
    """Yield the layers that compute. A layer is INT8 if its data and its weights are quantized."""
    ir = _IR.read(path)
    for number, layer in ir.layers.items():
        kind = str(layer.get("type"))
        if kind not in COMPUTES or not ir.reads.get(number):
            continue
        data, *others = ir.reads[number]
        weights = [others[i - 1] for i in RECURRENT.get(kind, (1,))] if kind in WEIGHTED else []
        if ir.is_quantized(data) and all(ir.are_int8(node, kind) for node in weights):
            precision = "int8"
        else:
            precision = "fp16" if any(ir.holds(node, ("f16",)) for node in others) else "fp32"
        yield ArtifactLayer(kind, precision, _macs(kind, layer) if kind in WEIGHTED else 0)


@dataclass(frozen=True)
class _IR:
    """The layers of the outermost graph by id, and the ids of the layers that each one reads, by port."""

    layers: Mapping[str, ElementTree.Element]
    reads: Mapping[str, Sequence[str]]

    @classmethod
    def read(cls, path: Path) -> _IR:
        root = ElementTree.parse(path).getroot()
        layers = {str(layer.get("id")): layer for layer in root.iterfind("layers/layer")}
        reads: dict[str, list[str]] = {}
        for edge in sorted(root.iterfind("edges/edge"), key=lambda edge: int(edge.get("to-port", "0"))):
            reads.setdefault(str(edge.get("to-layer")), []).append(str(edge.get("from-layer")))
        return cls(layers, reads)

    def kind(self, number: str) -> str:
        return str(self.layers[number].get("type"))

    def is_quantized(self, number: str) -> bool:
        """Whether a value is the output of a FakeQuantize to 8 bits."""
        while (self.kind(number) in MOVES and self.kind(number) != "Concat") or self.is_unpacked(number):
            number = self.reads[number][0]
        if self.kind(number) == "Concat":
            return all(self.is_quantized(one) for one in self.reads[number])
        data = self.layers[number].find("data")
        return self.kind(number) == "FakeQuantize" and data is not None and int(data.get("levels", "0")) <= LEVELS_MAX

    def is_unpacked(self, number: str) -> bool:
        """Whether a value is computed from 8 bits by `Convert` and arithmetic, as in ONNX's Q/DQ."""
        while self.kind(number) in UNPACKS and self.reads.get(number):
            data = self.layers[number].find("data")
            if self.kind(number) == "Convert" and data is not None and data.get("destination_type") in INT8_TYPES:
                return True
            number = self.reads[number][0]
        return False

    def are_int8(self, number: str, kind: str) -> bool:
        """Whether a layer's weights, or the second matrix of a product, are quantized.

        OpenVINO computes a grouped convolution in float if its weights are not a constant before they are quantized.
        """
        if self.holds(number, INT8_TYPES):
            return True
        if kind.startswith("Group") and self.kind(number) == "FakeQuantize":
            return self.kind(self.reads[number][0]) == "Const"
        return self.is_quantized(number)

    def holds(self, number: str, types: Sequence[str]) -> bool:
        """Whether a weight, or the constant from which it is unpacked, has one of `types`."""
        if self.kind(number) == "Const":
            data = self.layers[number].find("data")
            return data is not None and data.get("element_type") in types
        return self.kind(number) in UNPACKS and any(self.holds(one, types) for one in self.reads.get(number, []))


def _macs(kind: str, layer: ElementTree.Element) -> int | None:
    shapes = [_dims(port) for port in layer.iterfind("input/port")]
    data, weights, out = shapes[0], shapes[1], _dims(layer.find("output/port"))
    grouped = 2 if kind.startswith("Group") else 1
    if kind in CONVOLUTIONS:
        return product(out, weights[grouped:])
    if kind in BACKWARD:
        return product(data, weights[grouped:])
    if kind in RECURRENT:
        steps = product(data[:-1]) or 0
        return steps * sum(product(shapes[i]) or 0 for i in RECURRENT[kind])
    options = layer.find("data")
    turned = len(data) > 1 and options is not None and options.get("transpose_a") == "true"
    return product(out, data[-2:-1] if turned else data[-1:])


def _dims(port: ElementTree.Element | None) -> list[int]:
    return [] if port is None else [int(dim.text or -1) for dim in port.iterfind("dim")]
