"""Converts models to an opset that the runtimes read.

Runtimes on devices are older than exporters: ONNX Runtime 1.22 accepts opsets up to 22 and IR up to 10; TensorRT 10.3
accepts only lower opsets. So ONNX's converter lowers a newer opset to OPSET_MAX. It raises an opset below OPSET_MIN to
OPSET_RAISED_TO, because QuantizeLinear has no scales per channel in opsets below OPSET_MIN. The build uses the
converted model only if its answers stay the same. Otherwise the model does not change.
"""

from __future__ import annotations

from typing import Any

from edgert_deploy.packager.sources.onnx_graph.nodes import attribute_of, copy_of, graphs_of, nodes_of, refill
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of, structure_of

OPSET_MIN = 13  # the first opset whose QuantizeLinear has scales per channel
OPSET_RAISED_TO = 17
OPSET_MAX = 21
OPSET_OF_RESIZE_MODES = 11  # the first opset in which Resize has attributes for its modes
# The last opset in which DFT's axis is an attribute. In later opsets, the axis is an input, which OpenVINO ignores.
OPSET_OF_DFT = 19
# OpenVINO ignores the attribute `axes` of these operators. In OPSET_OF_REDUCTIONS, the axes become an input.
REDUCTIONS = frozenset({"ReduceL1", "ReduceLogSum", "ReduceLogSumExp"})
OPSET_OF_REDUCTIONS = 18
IR_MAX = 10  # the version of the file format (IR) that belongs to OPSET_MAX


def wanted_opsets(proto: Any) -> list[int]:
    """Return the opsets to try for the model, from OPSET_MIN to OPSET_MAX, the best first."""
    opset = opset_of(proto)
    wanted = [OPSET_RAISED_TO if opset < OPSET_MIN else min(opset, OPSET_MAX)]
    if opset > OPSET_OF_DFT and any(node.op_type == "DFT" for node in nodes_of(proto.graph)):
        wanted.insert(0, OPSET_OF_DFT)
    if opset < OPSET_OF_REDUCTIONS and any(node.op_type in REDUCTIONS for node in nodes_of(proto.graph)):
        wanted.insert(0, OPSET_OF_REDUCTIONS)
    return wanted


def at_opset(proto: Any, opset: int) -> Any:
    """Return the model in `opset`, with an IR of at most IR_MAX; None if ONNX cannot convert the model."""
    from onnx import version_converter

    converted = proto
    if opset_of(proto) != opset:
        try:
            converted = version_converter.convert_version(proto, opset)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - native code raises any class; the model then stays as it is
            return None
        if opset_of(proto) < OPSET_OF_RESIZE_MODES:
            converted = copy_of(converted)
            _state_resize_modes(converted)
    if converted.ir_version > IR_MAX:
        converted = copy_of(converted)
        converted.ir_version = IR_MAX
    return converted


def _state_resize_modes(proto: Any) -> None:
    """State the modes that Resize and Upsample always had in older opsets, which ONNX's converter omits."""
    from onnx import helper

    for node in nodes_of(proto.graph):
        if node.op_type == "Resize" and attribute_of(node, "coordinate_transformation_mode") is None:
            node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
            node.attribute.append(helper.make_attribute("nearest_mode", "floor"))


def rewrite_misread_dfts(proto: Any) -> bool:
    """Rewrite DFTs that OpenVINO misreads; return whether any changed.

    OpenVINO misreads negative axes, so the new axes count from the front. In OpenVINO, the result of a one-sided DFT
    has one axis too many, and the result of its inverse has one axis too few; a Reshape corrects both.
    """
    from onnx import shape_inference

    found = [(node, a) for node in nodes_of(proto.graph) if node.op_type == "DFT" for a in node.attribute]
    negative = [(node, attribute) for node, attribute in found if attribute.name == "axis" and attribute.i < 0]
    one_sided = [node for node, attribute in found if attribute.name == "onesided" and attribute.i]
    if not (negative or one_sided):
        return False
    graphs = graphs_of(shape_inference.infer_shapes(structure_of(proto)).graph)
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for graph in graphs
        for value in (*graph.input, *graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    for node, attribute in negative:
        attribute.i += ranks.get(node.input[0], 0)
    nodes = []
    for node in proto.graph.node:
        flat = node in one_sided and node.input[0] in ranks
        nodes += [node, _reshaped(proto.graph, node, ranks[node.input[0]])] if flat else [node]
    refill(proto.graph.node, nodes)
    return True


def _reshaped(graph: Any, node: Any, rank: int) -> Any:
    """Return a Reshape for the result of a DFT: only the last axis changes.

    It has length 2, or 1 for the real numbers of an inverse.
    """
    import numpy as np
    from onnx import helper, numpy_helper

    name = str(node.output[0])
    node.output[0] = f"{name}/edgert_one_sided"
    shape = np.array([*[0] * (rank - 1), 1 if attribute_of(node, "inverse") else 2], np.int64)
    graph.initializer.append(numpy_helper.from_array(shape, f"{name}/edgert_shape"))
    return helper.make_node("Reshape", [node.output[0], f"{name}/edgert_shape"], [name], f"{name}/edgert_reshape")
