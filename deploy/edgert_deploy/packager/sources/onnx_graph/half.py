"""Widens FP16 and BF16 models to FP32.

No builder quantizes them, TFLite reads none, and OpenVINO misreads weights in BF16. Every value of FP16 and BF16 is one
of FP32, so the weights stay what they are. `--precision fp16` halves them again.
"""

from __future__ import annotations

from typing import Any

from edgert_deploy.packager.sources.onnx_graph.nodes import graphs_of, nodes_of, tensors

# The attributes of Cast, EyeLike and the random operators that name the type of the result.
TYPE_ATTRIBUTES = ("to", "dtype")


def widen_half(proto: Any) -> tuple[str, ...]:
    """Make all FP16 and BF16 of a ModelProto FP32; return a remark, and one for each input and output."""
    import numpy as np
    from onnx import TensorProto, numpy_helper

    half = [tensor for tensor in tensors(proto) if tensor.data_type in _halves()]
    outer = [value for value in (*proto.graph.input, *proto.graph.output) if _is_half(value)]
    if not half and not outer:
        return ()
    given = [*(tensor.data_type for tensor in half), *(value.type.tensor_type.elem_type for value in outer)]
    kind = "FP16" if TensorProto.FLOAT16 in given else "BF16"
    for tensor in half:
        name = tensor.name
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), name))
    for graph in (proto.graph, *proto.functions):
        for node in nodes_of(graph):
            for attribute in node.attribute:
                if attribute.name in TYPE_ATTRIBUTES and attribute.i in _halves():
                    attribute.i = TensorProto.FLOAT
    for graph in graphs_of(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if _is_half(value):
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    remarks = [f"the model computes in {kind}; it is built from the same weights in FP32"]
    return (*remarks, *(f"{value.name!r} is FP32, not {kind}: send and read it as float32" for value in outer))


def _halves() -> tuple[int, int]:
    from onnx import TensorProto

    return TensorProto.FLOAT16, TensorProto.BFLOAT16


def _is_half(value: Any) -> bool:
    return value.type.tensor_type.elem_type in _halves()
