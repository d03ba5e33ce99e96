"""Rewrites models in FP16, BF16 or FP64 as models in FP32.

No builder quantizes such models, and TFLite reads none of them. OpenVINO misreads weights in BF16 and does not compute
in FP64. ONNX Runtime has no convolution in FP64. FP32 represents every value of FP16 and BF16, so these weights keep
their values, and `--precision fp16` halves their size again. FP64 is rounded, so the caller compares the answers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.onnx_graph.nodes import PROTO_BYTES_MAX, graphs_of, nodes_of, tensors

# The attributes of Cast, EyeLike and the random operators that name the type of the result.
TYPE_ATTRIBUTES = ("to", "dtype")


def widen_half(proto: Any) -> tuple[str, ...]:
    """Convert all FP16 and BF16 of a model to FP32; return a remark, and one for each input and output."""
    from onnx import TensorProto

    return _as_fp32(proto, {TensorProto.FLOAT16: "FP16", TensorProto.BFLOAT16: "BF16"}, "from the same weights in FP32")


def narrow_double(proto: Any) -> tuple[str, ...]:
    """Convert all FP64 of a model to FP32; return remarks like `widen_half`."""
    from onnx import TensorProto

    return _as_fp32(proto, {TensorProto.DOUBLE: "FP64"}, "in FP32, and answers a random sample of small numbers alike")


def has_double(proto: Any) -> bool:
    """Whether a model has tensors, inputs, outputs or casts in FP64."""
    from onnx import TensorProto

    return any(_found(proto, (TensorProto.DOUBLE,)))


def _found(proto: Any, kinds: Collection[int]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the tensors, the inputs and outputs, and the attributes that have one of `kinds`."""
    graphs = (proto.graph, *proto.functions)
    attributes = (each for graph in graphs for node in nodes_of(graph) for each in node.attribute)
    return (
        [tensor for tensor in tensors(proto) if tensor.data_type in kinds],
        [value for value in (*proto.graph.input, *proto.graph.output) if _type_of(value) in kinds],
        [each for each in attributes if each.name in TYPE_ATTRIBUTES and each.i in kinds],
    )


def _as_fp32(proto: Any, kinds: dict[int, str], how: str) -> tuple[str, ...]:
    import numpy as np
    from onnx import TensorProto, numpy_helper

    stored, outer, named = _found(proto, kinds)
    kind_of_outer = {value.name: kinds[_type_of(value)] for value in outer}  # before these values become FP32
    types = {*(tensor.data_type for tensor in stored), *map(_type_of, outer), *(attribute.i for attribute in named)}
    if not types:
        return ()
    size = sum(math.prod(tensor.dims) for tensor in stored) * 4
    if size > PROTO_BYTES_MAX:
        raise SourceInvalid(
            f"the weights need {size} bytes in FP32, from which every artifact is built. The limit is {PROTO_BYTES_MAX} bytes "
            "(one protobuf message): use a smaller variant of the model"
        )
    largest = np.finfo(np.float32).max
    for tensor in stored:
        name, array = tensor.name, numpy_helper.to_array(tensor)
        if tensor.data_type == TensorProto.DOUBLE:  # a mask of -1e308 stays finite
            array = np.where(np.isinf(array), array, np.clip(array, -largest, largest))
        tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))
    for attribute in named:
        attribute.i = TensorProto.FLOAT
    for graph in graphs_of(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if _type_of(value) in kinds:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
    found = " and ".join(kind for each, kind in kinds.items() if each in types)
    remarks = [f"the model computes in {found}; it is built {how}"]
    for name, kind in kind_of_outer.items():
        digits = ", which keeps 7 digits of a number" if kind == "FP64" else ""
        remarks.append(f"{name!r} is FP32, not {kind}: send and read it as float32{digits}")
    return tuple(remarks)


def _type_of(value: Any) -> int:
    return int(value.type.tensor_type.elem_type)
