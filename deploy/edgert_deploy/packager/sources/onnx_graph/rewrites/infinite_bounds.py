"""Removes infinite bounds of Clip, because an infinite bound means the same as no bound.

No engine can quantize an infinite bound, and the check of weights would report the bound as a damaged weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.nodes import Constants, nodes_of

BOUNDS = {1: -np.inf, 2: np.inf}  # the position of each bound in Clip's inputs -> the bound that has no effect


def drop_infinite_bounds(proto: Any) -> bool:
    """Remove the infinite bounds of each Clip, in place; return whether there were any."""
    constants, dropped = Constants(proto), set[str]()
    for node in nodes_of(proto.graph):
        if node.op_type != "Clip":
            continue
        for at, unbounded in BOUNDS.items():
            bound = constants.get(node.input[at]) if len(node.input) > at else None
            if bound is not None and bound.size == 1 and bound.item() == unbounded:
                dropped.add(node.input[at])
                node.input[at] = ""
        while node.input and not node.input[-1]:
            node.input.pop()
    unread = dropped - {name for node in nodes_of(proto.graph) for name in node.input}
    for field in (proto.graph.initializer, proto.graph.input):
        for message in [message for message in field if message.name in unread]:
            field.remove(message)
    return bool(dropped)
