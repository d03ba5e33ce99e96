"""Rewrites models in FP16, BF16 or FP64 as models in FP32.

No builder quantizes such models, and TFLite cannot run them. OpenVINO misreads weights in BF16 and does not compute in
FP64. ONNX Runtime has no convolution in FP64. FP32 represents every value of FP16 and BF16, so weights in FP16 and BF16
keep their values, and `--precision fp16` halves their size again. Values in FP64 are rounded, so the caller compares
the answers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from edgert.errors import SourceInvalid
from edgert_deploy.packager.sources.onnx_graph.nodes import PROTO_BYTES_MAX, graphs_of, nodes_of, tensors

# In Cast, EyeLike and the random operators, one of these attributes gives the type of the result.
TYPE_ATTRIBUTES = ("to", "dtype")


def widen_half(proto: Any) -> tuple[str, ...]:
    """Convert FP16 and BF16 to FP32; return a remark on the model, and one per changed input and output."""
    from onnx import TensorProto

    return _as_fp32(proto, {TensorProto.FLOAT16: "FP16", TensorProto.BFLOAT16: "BF16"}, "from the same weights in FP32")


def narrow_double(proto: Any) -> tuple[str, ...]:
    """Convert FP64 to FP32; return the same remarks as `widen_half`."""
    from onnx import TensorProto

    return _as_fp32(
        proto,
        {TensorProto.DOUBLE: "FP64"},
        "in FP32, and gives nearly the same answer to a random sample of small numbers",
    )


def has_double(proto: Any) -> bool:
    """Whether a model has tensors, inputs, outputs or casts in FP64."""
    from onnx import TensorProto

    return any(_found(proto, (TensorProto.DOUBLE,)))


def _found(proto: Any, kinds: Collection[int]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return three lists, of the tensors, the inputs and outputs, and the attributes with one of `kinds`."""
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
    kind_of_outer = {value.name: kinds[_type_of(value)] for value in outer}  # the kinds before they become FP32
    types = {*(tensor.data_type for tensor in stored), *map(_type_of, outer), *(attribute.i for attribute in named)}
    if not types:
        return ()
    size = sum(math.prod(tensor.dims) for tensor in stored) * 4
    if size > PROTO_BYTES_MAX:
        raise SourceInvalid(
            f"the build makes every artifact from the weights in FP32, which need {size} bytes. The limit is {PROTO_BYTES_MAX} "
            "bytes (one protobuf message): use a smaller variant of the model"
        )
    largest = np.finfo(np.float32).max
    for tensor in stored:
        name, array = tensor.name, numpy_helper.to_array(tensor)
        if tensor.data_type == TensorProto.DOUBLE:  # clipped, so that a mask of -1e308 stays finite
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
        digits = ", which keeps 7 digits of each number" if kind == "FP64" else ""
        remarks.append(f"{name!r} is FP32, not {kind}: send and read it as float32{digits}")
    return tuple(remarks)


def _type_of(value: Any) -> int:
    return int(value.type.tensor_type.elem_type)
