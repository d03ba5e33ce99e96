"""Casts around arithmetic of small integers: TFLite has it for wider integers only.

TFLite takes 8 and 16-bit integers for quantized values. Its kernels then read a scale, which plain integers do not
have, and abort without it. The cast back drops the upper bits, which is ONNX's wrap-around.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Graph, Node
from edgert_deploy.packager.tflite_lowering.op import Op

WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("int8"): np.dtype("int32"),
    np.dtype("uint8"): np.dtype("int32"),
    np.dtype("int16"): np.dtype("int32"),
    np.dtype("uint16"): np.dtype("int32"),
    np.dtype("uint32"): np.dtype("int64"),
}


def widen(graph: Graph, ops: Mapping[str, Op]) -> Graph:
    """Return `graph` with casts around each of `ops` that reads or makes a dtype which it widens."""
    widening = _Widening(graph, ops)
    for node in graph.nodes:
        widening.add(node)
    copies = {_wide_name(name): name for name in graph.constants if _wide_name(name) in widening.constants}
    return graph.extended(widening.nodes, widening.constants, widening.shapes, widening.dtypes, copies)


class _Widening:
    """The nodes of the widened graph, and the values that are added."""

    def __init__(self, graph: Graph, ops: Mapping[str, Op]) -> None:
        self.graph, self.ops = graph, ops
        self.nodes: list[Node] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self.shapes: dict[str, BatchShape] = {}
        self.dtypes: dict[str, np.dtype[Any]] = {}

    def add(self, node: Node) -> None:
        op = self.ops.get(node.op_type)
        too_narrow = op.widens if op is not None else frozenset()
        narrow = {name for name in (*node.inputs, *node.outputs) if self.graph.dtypes.get(name) in too_narrow}
        if not narrow:
            self.nodes.append(node)
            return
        inputs = tuple(self._widened(name) if name in narrow else name for name in node.inputs)
        outputs = tuple(self._wide(name) if name in narrow else name for name in node.outputs)
        self.nodes.append(replace(node, inputs=inputs, outputs=outputs))
        for name in filter(narrow.__contains__, node.outputs):
            self._cast(node, self._wide(name), name)

    def _widened(self, name: str) -> str:
        """Return the wide copy of an input, made at its first use."""
        wide = _wide_name(name)
        if wide in self.dtypes:
            return wide
        self._wide(name)
        if name in self.graph.constants:
            self.constants[wide] = self.graph.constants[name].astype(self.dtypes[wide])
        else:
            self._cast(None, name, wide)
        return wide

    def _wide(self, name: str) -> str:
        wide = _wide_name(name)
        self.dtypes[wide] = WIDER[self.graph.dtypes[name]]
        if name in self.graph.shapes:
            self.shapes[wide] = self.graph.shapes[name]
        return wide

    def _cast(self, node: Node | None, source: str, output: str) -> None:
        self.nodes.append(Node("Cast", "", node.name if node else "", (source,), (output,)))


def _wide_name(name: str) -> str:
    return f"{name}_wide"
