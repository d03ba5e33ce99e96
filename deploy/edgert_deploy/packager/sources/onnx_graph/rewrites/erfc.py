"""Replaces Erfc, which tf2onnx writes for a SavedModel's GELU, although ONNX has no such operator."""

from __future__ import annotations

from typing import Any

from edgert_deploy.packager.sources.onnx_graph.nodes import graphs_of, refill


def replace_erfc(proto: Any) -> bool:
    """Replace each Erfc(x) by 1 + Erf(-x), in place; return whether there was any."""
    found = False
    for graph in graphs_of(proto.graph):
        if any(node.op_type == "Erfc" for node in graph.node):
            refill(graph.node, (new for node in graph.node for new in _without_erfc(node)))
            found = True
    return found


def _without_erfc(node: Any) -> list[Any]:
    from onnx import helper

    if node.op_type != "Erfc":
        return [node]
    (x,), (y,) = node.input, node.output
    negative, erf, one, cast = (f"{y}/{name}" for name in ("negative", "erf", "one", "cast"))
    return [
        helper.make_node("Neg", [x], [negative], name=negative),
        helper.make_node("Erf", [negative], [erf], name=erf),
        helper.make_node("Constant", [], [one], name=one, value_float=1.0),
        helper.make_node("CastLike", [one, erf], [cast], name=cast),
        helper.make_node("Add", [erf, cast], [y], name=node.name),
    ]
