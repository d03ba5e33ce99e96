"""The layers of an ONNX artifact: the precision and the multiply-accumulates of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer, Shape, product
from edgert_deploy.packager.sources.onnx_graph.nodes import attribute_of, graphs_inside
from edgert_deploy.packager.sources.onnx_graph.structure import structure_of

# Operators that move or convert values, but compute nothing.
PASSIVE_OPS = frozenset(["Cast", "Constant", "DequantizeLinear", "Identity", "QuantizeLinear", "Shape"])
# Operators that always run in INT8, and the positions of the two inputs that they multiply.
INT8_OPS = {
    "ConvInteger": (0, 1),
    "DynamicQuantizeLSTM": (0, 1),
    "DynamicQuantizeMatMul": (0, 1),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "QGemm": (0, 3),
    "QLinearConv": (0, 3),
    "QLinearMatMul": (0, 3),
}
CONVOLUTIONS = frozenset(["Conv", "ConvInteger", "QLinearConv"])
PRODUCTS = frozenset(
    ["DynamicQuantizeMatMul", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm"]
    + ["QLinearMatMul"]
)
RECURRENT = frozenset(["DynamicQuantizeLSTM", "GRU", "LSTM", "RNN"])
WEIGHTED = CONVOLUTIONS | PRODUCTS | RECURRENT | {"ConvTranspose"}
# Operators that may be between a DequantizeLinear and the layer that reads it, because they do not change values.
MOVES = frozenset(["Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
# Values of TensorProto.DataType.
UINT8 = 2
INT8 = 3


def onnx_layers(path: Path, *, needs_quantized_result: bool = False) -> Iterator[ArtifactLayer]:
    """Yield the layers of the artifact at `path`.

    A layer is INT8 if its operator always runs in INT8, or if the values that it multiplies come from DequantizeLinear
    nodes. With `needs_quantized_result`, a convolution is INT8 only if its result is quantized, too.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    graph = _Graph.of(model.graph)
    shapes = _shapes(model)
    half = {t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16}
    half |= {node.output[0] for node in model.graph.node if attribute_of(node, "to") == onnx.TensorProto.FLOAT16}
    for node in model.graph.node:
        yield from _inner_layers(node, shapes)
        if node.op_type in PASSIVE_OPS:
            continue
        is_half = any(name in half for name in node.input)
        if is_half:
            half.update(node.output)
        macs = _macs(node, shapes) if node.op_type in WEIGHTED else 0
        if graph.is_int8(node, needs_quantized_result):
            yield ArtifactLayer(node.op_type, "int8", macs)
        else:
            yield ArtifactLayer(node.op_type, "fp16" if is_half else "fp32", macs)


def _inner_layers(node: Any, shapes: Mapping[str, list[int]]) -> Iterator[ArtifactLayer]:
    """Yield the layers inside `If`, `Loop` and `Scan`. They run in float. Each weight counts once."""
    for graph in graphs_inside(node):
        own = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        for inner in graph.node:
            if inner.op_type in WEIGHTED:
                weights = own.get(inner.input[1], shapes.get(inner.input[1]))
                yield ArtifactLayer(inner.op_type, "fp32", product(weights))


@dataclass(frozen=True)
class _Graph:
    """The type of each constant, the producer and the readers of each value, and the model's outputs."""

    types: Mapping[str, int]
    makers: Mapping[str, Any]
    readers: Mapping[str, Sequence[Any]]
    outputs: frozenset[str]

    @classmethod
    def of(cls, graph: Any) -> _Graph:
        readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        makers = {name: node for node in graph.node for name in node.output}
        types = {tensor.name: tensor.data_type for tensor in graph.initializer}
        return cls(types, makers, readers, frozenset(value.name for value in graph.output))

    def is_int8(self, node: Any, needs_quantized_result: bool) -> bool:
        if node.op_type in INT8_OPS:
            return True
        if node.op_type in RECURRENT or not node.input:
            return False  # no engine computes recurrent layers in INT8 from a Q/DQ graph
        factors = node.input[:2] if node.op_type in WEIGHTED else node.input[:1]
        if not all(self._is_dequantized(name) for name in factors):
            return False
        return not (needs_quantized_result and node.op_type == "Conv") or self._is_quantized(node.output[0])

    def _is_dequantized(self, name: str) -> bool:
        maker = self.makers.get(name)
        while maker is not None and maker.op_type in MOVES:
            maker = self.makers.get(maker.input[0])
        if maker is None or maker.op_type != "DequantizeLinear":
            return False
        # The zero point has the type of the data. Without a zero point, and for computed data, ONNX's default is uint8.
        return self.types.get(maker.input[2] if len(maker.input) > 2 else maker.input[0], UINT8) in (UINT8, INT8)

    def _is_quantized(self, name: str) -> bool:
        """Whether every reader of a value quantizes it, directly or after a ReLU that the engine fuses."""
        readers = self.readers.get(name, ())
        if name in self.outputs or not readers:
            return False
        return all(
            reader.op_type == "QuantizeLinear"
            or (reader.op_type in ("Clip", "Relu") and self._is_quantized(reader.output[0]))
            for reader in readers
        )


def _shapes(model: Any) -> dict[str, list[int]]:
    """Return the shapes of the values that shape inference finds, for a batch of one sample."""
    import onnx

    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    model = structure_of(model)
    graph = model.graph
    del graph.value_info[:]  # stated shapes with named axes would hide the inferred lengths
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.dim_value:
                dim.dim_value = 1
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            shapes[value.name] = [dim.dim_value for dim in tensor.shape.dim]
    return shapes


def _macs(node: Any, shapes: Mapping[str, list[int]]) -> int | None:
    data_at, weights_at = INT8_OPS.get(node.op_type, (0, 1))
    data, weights = (shapes.get(node.input[i]) for i in (data_at, weights_at))
    out: Shape = shapes.get(node.output[0])
    if data is None or weights is None:
        return None
    if node.op_type in CONVOLUTIONS:
        return product(out, weights[1:])
    if node.op_type == "ConvTranspose":
        return product(data, weights[1:])
    if node.op_type in RECURRENT:
        recurrent = product(shapes.get(node.input[2]))
        return None if recurrent is None else (product(data[:2]) or 0) * ((product(weights) or 0) + recurrent)
    turned = len(data) > 1 and attribute_of(node, "transA")
    return product(out, data[-2:-1] if turned else data[-1:])
