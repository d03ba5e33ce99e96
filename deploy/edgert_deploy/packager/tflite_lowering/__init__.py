"""ONNX to a float32 .tflite file, without TensorFlow.

    read_graph   folds the model, and finds the shape of every value at two batch sizes
    widen        puts casts around arithmetic of small integers
    fuse         replaces a group of nodes by one node, for which TFLite has an operator
    OPS          name of an ONNX operator -> an Op with the function that writes nodes of this operator (ops/)
    Lowering     knows the layouts and the tensors of the values
    Value        gives a tensor Python's operators, so that functions write nodes as formulas
    Writer       writes the flatbuffer

The lowering keeps the model's contract: names, order, layout and dtypes of inputs and outputs, and the open batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from edgert.errors import OperatorUnsupported
from edgert.printable import counted
from edgert_deploy.packager.sources.onnx_graph.branches import CONTROL_FLOW
from edgert_deploy.packager.sources.onnx_graph.structure import OF_DATA_LENGTHS, ONNX_DOMAINS
from edgert_deploy.packager.tflite_lowering.folding import FOLDED
from edgert_deploy.packager.tflite_lowering.fusion import fuse
from edgert_deploy.packager.tflite_lowering.graph import Graph, Node, read_graph
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops import OPS
from edgert_deploy.packager.tflite_lowering.ops.activation import IN_INT8
from edgert_deploy.packager.tflite_lowering.value import Unsupported
from edgert_deploy.packager.tflite_lowering.widening import widen

__all__ = ["OPS", "lower"]

Problem = tuple[str, str]  # the part that cannot be converted, and the reason


def lower(model: onnx.ModelProto, *, share_weights: bool = True, for_int8: bool = False) -> bytes:
    """Return the float32 .tflite file of a checked model. The same model gives the same bytes.

    Without `share_weights`, each operator has weights of its own, so that a quantizer can leave one of them in float.
    With `for_int8`, the file has operators that are fast in full INT8.
    Raises OperatorUnsupported with a list of all unsupported parts, and BuildFailed if ONNX Runtime cannot fold the
    model.
    """
    ops = OPS | (IN_INT8 if for_int8 else {})
    graph = fuse(widen(read_graph(model, ops), ops), ops)
    lowering = Lowering(graph, ops, share_weights=share_weights)
    problems = _define_inputs(lowering, graph)
    for node in graph.nodes:
        op = ops.get(node.op_type) if node.domain in ONNX_DOMAINS else None
        problems += _lower_node(lowering, node, op)
    if not problems:
        try:
            return lowering.finish()
        except Unsupported as reason:
            problems.append(("an output", str(reason)))
    raise OperatorUnsupported(
        f"{counted(len(problems), 'part')} of this model cannot be converted to TFLite: {_by_reason(problems)}. "
        "Export the model without these parts, or remove tflite from the profile's engines"
    )


def _by_reason(problems: Iterable[Problem]) -> str:
    """Return the problems as a text that names each reason once."""
    parts: dict[str, list[str]] = {}
    for part, reason in problems:
        parts.setdefault(reason, []).append(part)
    return "; ".join(f"{', '.join(named)}: {reason}" for reason, named in parts.items())


def _why_missing(op_type: str) -> str:
    if op_type in OF_DATA_LENGTHS:
        return (
            "the data determine how many results it gives, which TFLite does not support; if this is the NMS of a "
            "detector, export the decoded boxes and the scores without NMS, and build with --postprocess (docs/answers.md)"
        )
    if op_type in CONTROL_FLOW:
        return "it depends on the data, and TFLite has no such operator: build the model for targets with onnxruntime or openvino"
    return "EdgeRT does not express this operator in TFLite's operators"


def _define_inputs(lowering: Lowering, graph: Graph) -> list[Problem]:
    problems = []
    for name in graph.inputs:
        try:
            lowering.define_input(name)
        except Unsupported as reason:
            problems.append((f"input {name!r}", str(reason)))
            lowering.define_placeholder(name)
    return problems


def _lower_node(lowering: Lowering, node: Node, op: Op | None) -> list[Problem]:
    """Write `node`; return the problem if this is impossible.

    In this case, the outputs of `node` are defined all the same, so that one run finds the problems of all nodes.
    """
    problems = []
    try:
        if op is None and (node.op_type not in FOLDED or lowering.placeholders.isdisjoint(node.inputs)):
            raise Unsupported(_why_missing(node.op_type))
        if op is not None and lowering.unknown.isdisjoint(node.inputs):
            op.write(lowering, node)
            lowering.record_sign(node)
            return []
    except Unsupported as reason:
        problems.append((f"{node.op_type} (node {node.name or node.outputs[0]!r})", str(reason)))
    for name in filter(None, node.outputs):
        lowering.define_placeholder(name)
    return problems
