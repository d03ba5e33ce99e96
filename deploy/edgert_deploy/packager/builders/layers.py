"""The layers of a model. Mixed precision quantizes a layer, or keeps it in float, as a whole.

A layer starts with an operator that has weights or several inputs (Conv, Gemm, MatMul, Add, ...). The next operators
that only reshape its result or apply an element-wise function (Relu, Clip, Reshape, ...) belong to the layer, because
every engine fuses them. This module finds layers in the graph that ONNX Runtime's tools prepare (BatchNormalization
folded). Each engine finds its own operators by the names of ONNX's nodes and values, which all engines keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Operators that belong to the layer whose result they read.
FOLLOWERS = frozenset(
    ["BatchNormalization", "Clip", "Dropout", "Elu", "Flatten", "Gelu", "HardSigmoid", "HardSwish", "Identity"]
    + ["LeakyRelu", "Mish", "PRelu", "Relu", "Reshape", "Sigmoid", "Softplus", "Squeeze", "Tanh", "Unsqueeze"]
)
# Operators that turn lengths into data, such as positions, or whose branches may read data.
MAKERS = frozenset(["ConstantOfShape", "Expand", "EyeLike", "If", "Loop", "Range", "Scan", "Tile"])


@dataclass(frozen=True)
class Layer:
    """A layer: name and operator of its first node, names of all its nodes and of their results."""

    name: str
    op: str
    nodes: tuple[str, ...]
    values: tuple[str, ...]


def layers_of(proto: Any) -> tuple[Layer, ...]:
    """Return the layers of a prepared graph, whose nodes all have names, in the order of the nodes."""
    constants, of_lengths = {tensor.name for tensor in proto.graph.initializer}, length_nodes(proto)
    readers = Counter(name for node in proto.graph.node for name in node.input)
    readers.update(value.name for value in proto.graph.output)
    layer_of: dict[str, int] = {}  # name of a value -> position of its layer in `members`
    members: list[list[Any]] = []
    for node in proto.graph.node:
        if node.op_type in ("Constant", "QuantizeLinear", "DequantizeLinear") or node.name in of_lengths:
            continue
        read = [name for name in node.input if name and name not in constants]
        follows = node.op_type in FOLLOWERS and bool(read) and readers[read[0]] == 1 and read[0] in layer_of
        index = layer_of[read[0]] if follows else len(members)
        if not follows:
            members.append([])
        members[index].append(node)
        layer_of.update((name, index) for name in node.output if name)
    return tuple(_layer(nodes) for nodes in members)


def length_nodes(proto: Any) -> set[str]:
    """Return the names of the nodes that compute only with lengths of axes.

    They compute the pads of a convolution, for example, and must stay exact. PyTorch's TorchScript exporter divides
    lengths in FP32.
    """
    constants, lengths, names = {tensor.name for tensor in proto.graph.initializer}, set[str](), set[str]()
    for node in proto.graph.node:
        read = {name for name in node.input if name} - constants
        if node.op_type == "Constant":
            constants.update(node.output)
        elif node.op_type == "Shape" or (read and read <= lengths and node.op_type not in MAKERS):
            lengths.update(node.output)
            names.add(node.name)
    return names


def by_name(layers: Sequence[Layer], names: Iterable[str]) -> tuple[Layer, ...]:
    """Return the layers with these names, in the order of the graph."""
    chosen = set(names)
    return tuple(layer for layer in layers if layer.name in chosen)


def belongs(name: str, layers: Iterable[Layer], every: Iterable[Layer]) -> bool:
    """Whether an engine's operator `name` comes from one of `layers`, given `every` layer of the model.

    An engine that splits an operator appends a suffix to the name of the node or value: `conv1/WithoutBiases`,
    `n_scaled`.
    """
    best, length = None, 0
    for layer in every:
        for own in (*layer.nodes, *layer.values):
            if len(own) > length and (name == own or (name.startswith(own) and name[len(own)] in "_/.:")):
                best, length = layer, len(own)
    return best is not None and best in tuple(layers)


def _layer(nodes: Sequence[Any]) -> Layer:
    values = tuple(name for node in nodes for name in node.output if name)
    return Layer(nodes[0].name, nodes[0].op_type, tuple(node.name for node in nodes), values)
