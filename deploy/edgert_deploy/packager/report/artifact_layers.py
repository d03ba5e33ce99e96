"""In which precision an artifact computes each kind of layer, read from its file: what it says, not what was asked for.

ONNX: a node computes in INT8 where its data comes out of a DequantizeLinear (engines fuse the pair). OpenVINO: where
it comes out of a FakeQuantize. TFLite: by the type of what the operator writes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Layer = tuple[str, str]  # kind, precision
# What moves or converts values, but computes nothing.
ONNX_PASSIVE = frozenset(["Cast", "Constant", "DequantizeLinear", "Identity", "QuantizeLinear", "Shape"])
# Arithmetic on shapes and weights, and what is fused into the layer before it, would hide the layers that count.
OPENVINO_COMPUTES = frozenset(
    [
        "AvgPool",
        "Convolution",
        "ConvolutionBackpropData",
        "Gelu",
        "GroupConvolution",
        "GroupConvolutionBackpropData",
        "GRUSequence",
        "Interpolate",
        "LSTMSequence",
        "MatMul",
        "MaxPool",
        "MVN",
        "ReduceMean",
        "SoftMax",
        "Softmax",
    ]
)
OPENVINO_MOVES = frozenset(["Concat", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
TFLITE_PASSIVE = frozenset(("DEQUANTIZE", "QUANTIZE", "SHAPE"))


def layer_precisions(engine: str, path: Path) -> dict[str, dict[str, int]]:
    """{kind of layer: {"int8" | "fp16" | "fp32" | another dtype: how many}}, the most frequent kind first.

    Empty for an engine whose files nothing is known of, and for a file that is not what it should be.
    """
    read = READERS.get(engine)
    found: dict[str, Counter[str]] = {}
    try:
        for kind, precision in [] if read is None else read(path):
            found.setdefault(kind, Counter())[precision] += 1
    except Exception:  # noqa: BLE001 - a look at a file from anywhere, by four parsers; what it holds is checked elsewhere
        return {}
    ordered = sorted(found, key=lambda kind: (-sum(found[kind].values()), kind))
    return {kind: dict(found[kind].most_common()) for kind in ordered}


def _onnx(path: Path) -> Iterator[Layer]:
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    half = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT16}
    casts = {n.output[0] for n in graph.node for a in n.attribute if a.name == "to" and a.i == onnx.TensorProto.FLOAT16}
    for node in graph.node:
        if node.op_type in ONNX_PASSIVE:
            continue
        if node.input and makers.get(node.input[0]) == "DequantizeLinear":
            yield node.op_type, "int8"
            continue
        is_half = any(name in half or name in casts for name in node.input)
        if is_half:
            casts.update(node.output)
        yield node.op_type, "fp16" if is_half else "fp32"


def _openvino(path: Path) -> Iterator[Layer]:
    root = ElementTree.parse(path).getroot()
    layers = {str(layer.get("id")): layer for layer in root.iter("layer")}
    reads: dict[str, list[str]] = {}
    for edge in sorted(root.iter("edge"), key=lambda edge: int(edge.get("to-port", "0"))):
        reads.setdefault(str(edge.get("to-layer")), []).append(str(edge.get("from-layer")))
    for number, layer in layers.items():
        kind = str(layer.get("type"))
        if kind not in OPENVINO_COMPUTES or not reads.get(number):
            continue
        data, *weights = reads[number]
        while layers[data].get("type") in OPENVINO_MOVES:
            data = reads[data][0]
        if layers[data].get("type") == "FakeQuantize":
            yield kind, "int8"
        else:
            yield kind, "fp16" if any(_holds_fp16(one, layers, reads) for one in weights) else "fp32"


def _holds_fp16(number: str, layers: Mapping[str, ElementTree.Element], reads: Mapping[str, list[str]]) -> bool:
    """Whether a weight, or the constant that it is unpacked from, is stored in FP16."""
    if layers[number].get("type") == "Const":
        data = layers[number].find("data")
        return data is not None and data.get("element_type") == "f16"
    unpacked = layers[number].get("type") in ("Convert", "Reshape")
    return unpacked and any(_holds_fp16(one, layers, reads) for one in reads.get(number, []))


def _tflite(path: Path) -> Iterator[Layer]:
    from ai_edge_litert import schema_py_generated as schema

    def names(enum: type) -> dict[int, str]:
        return {value: name for name, value in vars(enum).items() if isinstance(value, int)}

    kinds, types = names(schema.BuiltinOperator), names(schema.TensorType)
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    for graph in model.subgraphs:
        for operator in graph.operators:
            code = model.operatorCodes[operator.opcodeIndex]
            kind = kinds[max(code.builtinCode, code.deprecatedBuiltinCode)]
            if kind in TFLITE_PASSIVE:
                continue
            precision = types[graph.tensors[operator.outputs[0]].type].lower()
            yield kind, {"float32": "fp32", "float16": "fp16"}.get(precision, precision)


READERS: dict[str, Callable[[Path], Iterator[Layer]]] = {
    "onnxruntime": _onnx,
    "tensorrt": _onnx,
    "openvino": _openvino,
    "tflite": _tflite,
}
