"""Adds casts around arithmetic of small integers, because TFLite supports it only for wider integers.

TFLite treats integers of 8 and 16 bits as quantized values. Its kernels read a scale, and abort because plain integers
have none. The cast back drops the upper bits, which is the overflow that ONNX defines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Graph, Node
from edgert_deploy.packager.tflite_lowering.op import Op

WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    **dict.fromkeys(map(np.dtype, ("int8", "uint8", "int16", "uint16")), np.dtype("int32")),
    np.dtype("uint32"): np.dtype("int64"),
}


def widen(graph: Graph, ops: Mapping[str, Op]) -> Graph:
    """Return `graph` with casts around each operator that reads or makes values of a dtype in `Op.widens`."""
    nodes: list[Node] = []
    originals: dict[str, str] = {}  # wide value -> its narrow value
    for node in graph.nodes:
        widens = ops[node.op_type].widens if node.op_type in ops else frozenset()
        read = {name: f"{name}_wide" for name in node.inputs if graph.dtypes.get(name) in widens}
        made = {name: f"{name}_unwrapped" for name in node.outputs if graph.dtypes.get(name) in widens}
        uncast = [name for name in read if read[name] not in originals and name not in graph.constants]
        nodes += [Node("Cast", "", "", (name,), (read[name],)) for name in uncast]
        inputs, outputs = tuple(read.get(n, n) for n in node.inputs), tuple(made.get(n, n) for n in node.outputs)
        nodes.append(replace(node, inputs=inputs, outputs=outputs))
        nodes += [Node("Cast", "", node.name, (wide,), (name,)) for name, wide in made.items()]
        originals |= {wide: name for name, wide in (read | made).items()}
    dtypes = {wide: WIDER[graph.dtypes[name]] for wide, name in originals.items()}
    shapes = {wide: graph.shapes[name] for wide, name in originals.items() if name in graph.shapes}
    constants = {
        wide: graph.constants[name].astype(dtypes[wide]) for wide, name in originals.items() if name in graph.constants
    }
    return graph.extended(nodes, constants, shapes, dtypes, originals)
