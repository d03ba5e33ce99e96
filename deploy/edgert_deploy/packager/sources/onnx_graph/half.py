"""Widens FP16 models to FP32: no builder quantizes FP16, and TFLite reads none.

Every value of FP16 is one of FP32, so the weights stay what they are. `--precision fp16` halves them again.
"""

from __future__ import annotations

from typing import Any

from edgert_deploy.packager.sources.onnx_graph.nodes import graphs_of, nodes_of, tensors

TYPE_ATTRIBUTES = (
    "to",
    "dtype",
)  # attributes of Cast, EyeLike and the random operators that name the type of the result


def widen_half(proto: Any) -> tuple[str, ...]:
    """Make all FP16 of a ModelProto FP32; return a remark, and one for each input and output."""
    import numpy as np
    from onnx import TensorProto, numpy_helper

    half = [tensor for tensor in tensors(proto) if tensor.data_type == TensorProto.FLOAT16]
    outer = [value for value in (*proto.graph.input, *proto.graph.output) if _is_half(value)]
    if not half and not outer:
        return ()
    for tensor in half:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), name))
    for graph in (proto.graph, *proto.functions):
        for node in nodes_of(graph):
            for attribute in node.attribute:
                if attribute.name in TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
                    attribute.i = TensorProto.FLOAT
    for graph in graphs_of(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if _is_half(value):
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    remarks = ["the model computes in FP16; it is built from the same weights in FP32"]
    return (*remarks, *(f"{value.name!r} is FP32, not FP16: send and read it as float32" for value in outer))


def _is_half(value: Any) -> bool:
    from onnx import TensorProto

    return bool(value.type.tensor_type.elem_type == TensorProto.FLOAT16)
