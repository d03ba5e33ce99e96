"""The layers of a .tflite file: the precision and the multiply-accumulates of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer, product

PASSIVE_OPERATORS = frozenset(("DEQUANTIZE", "QUANTIZE", "SHAPE"))
# The positions of an operator's inputs that hold its data and its weights.
FACTORS = {
    "BATCH_MATMUL": (0, 1),
    "CONV_2D": (0, 1),
    "CONV_3D": (0, 1),
    "DEPTHWISE_CONV_2D": (0, 1),
    "FULLY_CONNECTED": (0, 1),
    "TRANSPOSE_CONV": (2, 1),
    "UNIDIRECTIONAL_SEQUENCE_LSTM": (0, 2),
    "UNIDIRECTIONAL_SEQUENCE_RNN": (0, 1),
}
# The positions of a recurrent operator's inputs that hold weights. In each step, it multiplies by each weight once.
RECURRENT = {"UNIDIRECTIONAL_SEQUENCE_LSTM": range(1, 9), "UNIDIRECTIONAL_SEQUENCE_RNN": range(1, 3)}
PRECISIONS = {"float32": "fp32", "float16": "fp16", "uint8": "int8"}


def tflite_layers(path: Path) -> Iterator[ArtifactLayer]:
    """Yield the layers. The precision of a layer is the type of its result.

    A layer with float data and INT8 weights counts as INT8, because its operator quantizes the data and multiplies in
    INT8.
    """
    from ai_edge_litert import schema_py_generated as schema

    from edgert_deploy.packager.tflite_lowering.tables import code_of, unpacked

    def names(enum: type) -> dict[int, str]:
        return {value: name for name, value in vars(enum).items() if isinstance(value, int)}

    kinds, types = names(schema.BuiltinOperator), names(schema.TensorType)
    model = unpacked(path.read_bytes())
    for graph in model.subgraphs:
        for operator in graph.operators:
            kind = kinds[code_of(model, operator)]
            if kind in PASSIVE_OPERATORS:
                continue
            result = graph.tensors[operator.outputs[0]]
            read = [graph.tensors[i] for i in operator.inputs]  # -1 is an absent input; its tensor here is not used
            precision = types[result.type].lower()
            if kind in FACTORS and precision == "float32" and types[read[FACTORS[kind][1]].type] == "INT8":
                precision = "int8"
            yield ArtifactLayer(kind, PRECISIONS.get(precision, precision), _macs(kind, operator, read, result))


def _macs(kind: str, operator: Any, read: Sequence[Any], result: Any) -> int | None:
    if kind not in FACTORS:
        return 0
    data, weights = (_shape(read[i]) for i in FACTORS[kind])
    out = _shape(result)
    if kind in RECURRENT:
        each = (product(_shape(read[i])) for i in RECURRENT[kind] if operator.inputs[i] >= 0)
        return (product(data[:2]) or 0) * sum(one or 0 for one in each)
    if kind == "BATCH_MATMUL":
        return product(out, data[-2:-1] if operator.builtinOptions.adjX else data[-1:])
    if kind == "TRANSPOSE_CONV":
        return product(data, weights[:-1])
    if kind == "CONV_3D":
        return product(out, weights[:-1])
    # Depthwise weights are [1, height, width, channels]. The weights of a convolution are [output channels, height,
    # width, input channels].
    return product(out, weights[1:-1] if kind == "DEPTHWISE_CONV_2D" else weights[1:])


def _shape(tensor: Any) -> list[int]:
    return [] if tensor.shape is None else [int(length) for length in tensor.shape]
