"""Protects Pads of zeros before a MaxPool from a fault in older releases of ONNX Runtime.

The fault is in `Pad_Fusion`, which turns such a Pad into padding of the MaxPool. A MaxPool ignores its own padding, so
its result can be negative where the zeros of the Pad should give 0. Releases 1.23.2 and 1.31.1 have the fault, but
1.32.0 does not. The fusion affects the source's answers, ONNX Runtime's artifacts and the TFLite lowering, which starts
from ONNX Runtime's folding. The fusion changes a Pad only if all bytes of its value are 0. So this module writes -0.0,
which is the same number for every engine. A Pad before a convolution needs no protection, and neither does a Pad
between a Relu and a MaxPool.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.nodes import Constants, attribute_of, nodes_of
from edgert_deploy.packager.sources.onnx_graph.structure import structure_of

NEGATIVE_ZERO = "edgert_negative_zero"
# An optimization or a float build may remove these operators between a Pad and the node before or after it.
REMOVABLE = ("DequantizeLinear", "Identity", "QuantizeLinear", "Transpose")


def keep_zero_pads(proto: Any) -> bool:
    """Change the zeros of each Pad before a MaxPool to -0.0; return whether there were any."""
    from onnx import TensorProto, helper, numpy_helper, shape_inference

    pads = _pads(proto)
    if not pads:
        return False
    inferred = shape_inference.infer_shapes(structure_of(proto)).graph
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.value_info}
    zeros = {}
    for pad in pads:
        kind = types.get(pad.output[0], TensorProto.FLOAT)
        if kind in (TensorProto.FLOAT, TensorProto.DOUBLE):
            zero = np.array(-0.0, helper.tensor_dtype_to_np_dtype(kind))
            zeros[kind] = numpy_helper.from_array(zero, f"{NEGATIVE_ZERO}_{zero.dtype}")
            pad.input[2:3] = [zeros[kind].name]
    proto.graph.initializer.extend(zeros.values())
    return bool(zeros)


def _pads(proto: Any) -> list[Any]:
    """Return the Pads with zeros that a MaxPool reads, except after a Relu, where the fusion is harmless."""
    constants, nodes = Constants(proto), list(nodes_of(proto.graph))
    makers = {name: node for node in nodes for name in node.output if name}

    def maker(name: str) -> Any:
        while (node := makers.get(name)) is not None and node.op_type in REMOVABLE:
            name = node.input[0]
        return node

    def is_wrong(pad: Any) -> bool:
        if pad is None or pad.op_type != "Pad" or len(pad.input) < 2:  # before opset 11, the value is an attribute
            return False
        if attribute_of(pad, "mode", b"constant") != b"constant":
            return False
        value = constants.get(pad.input[2]) if len(pad.input) > 2 and pad.input[2] else np.zeros(())
        before = maker(pad.input[0])
        return value is not None and not value.any() and (before is None or before.op_type != "Relu")

    readers = (maker(node.input[0]) for node in nodes if node.op_type == "MaxPool")
    return [pad for pad in readers if is_wrong(pad)]
