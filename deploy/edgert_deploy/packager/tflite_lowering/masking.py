"""Masked scores of attention: replaces minus infinity by a number that INT8 can hold.

Exporters add -3.4e38 or minus infinity to the scores that a Softmax must ignore. MASKED_SCORE has the same effect: in
float32, its exponential is zero. A model tests whether all scores of a row are masked: whether the largest score is
minus infinity, or the result of the Softmax is not a number. The new test is whether the largest score is at most
MASKED_BELOW.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Graph, Node
from edgert_deploy.packager.tflite_lowering.rewriting import Links

MASKED_SCORE = -1e4
MASKED_BELOW = -5e3
# Operators that may be between the constant of a mask and its Softmax.
MASK_CHAIN = frozenset({"Add", "Expand", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "Where"})
# The name of the constant with the value MASKED_BELOW. No exporter uses such a name.
THRESHOLD = "edgert:masked_below"


@dataclass
class _Changes:
    """The changes of a graph.

    `nodes` maps the first output of a node to the nodes that replace this node. The other fields describe new values.
    """

    nodes: dict[str, list[Node]] = field(default_factory=dict)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    shapes: dict[str, BatchShape] = field(default_factory=dict)
    dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict)


def soften_masks(graph: Graph) -> Graph:
    """Raise constants below MASKED_SCORE to MASKED_SCORE, if they reach nothing but scores of a Softmax."""
    links, changes = Links(graph), _Changes()
    waiting = [name for node in graph.nodes if node.op_type == "Softmax" for name in node.inputs]
    seen: set[str] = set()
    while waiting:
        node = links.producers.get(waiting.pop())
        if node is None or node.op_type not in MASK_CHAIN or node.outputs[0] in seen:
            continue
        seen.add(node.outputs[0])
        waiting += node.inputs
        below = {name for name in node.inputs if _is_below(graph.constants.get(name))}
        tests = _row_tests(links, node.outputs[0]) if below else None
        if tests is not None:
            inputs = tuple(_softened(name) if name in below else name for name in node.inputs)
            changes.nodes[node.outputs[0]] = [replace(node, inputs=inputs)]
            changes.constants |= {_softened(n): np.maximum(graph.constants[n], np.float32(MASKED_SCORE)) for n in below}
            for test in tests:
                _test_by_threshold(links, test, changes)
    return _changed(graph, changes)


def _is_below(array: NDArray[Any] | None) -> bool:
    return array is not None and array.dtype == np.float32 and bool((array < MASKED_SCORE).any())


def _softened(name: str) -> str:
    return f"{name}_softened"


def _row_tests(links: Links, name: str) -> list[Node] | None:
    """Return the nodes that test for a fully masked row; None if `name` also reaches other nodes."""
    tests: list[Node] = []
    waiting = [name]
    while waiting:
        value = waiting.pop()
        if value in links.graph.outputs:
            return None
        for user in links.users.get(value, []):
            if user.op_type in MASK_CHAIN:
                waiting += user.outputs
            elif user.op_type == "Softmax":
                tests += [reader for reader in links.users.get(user.outputs[0], []) if reader.op_type == "IsNaN"]
            else:
                equal = links.only_user(user) if user.op_type == "ReduceMax" else None
                if equal is None or equal.op_type != "Equal":
                    return None
                tests.append(equal)
    only_chosen_by = (links.only_user(test) for test in tests if test.op_type == "IsNaN")
    return tests if all(user is not None and user.op_type == "Where" for user in only_chosen_by) else None


def _test_by_threshold(links: Links, test: Node, changes: _Changes) -> None:
    """Make `test` compare the largest score with MASKED_BELOW, not with minus infinity or NaN."""
    output = test.outputs[0]
    changes.constants[THRESHOLD] = np.array(MASKED_BELOW, np.float32)
    if test.op_type == "Equal":
        largest = next(name for name in test.inputs if name not in links.graph.constants)
        changes.nodes[output] = [replace(test, op_type="LessOrEqual", inputs=(largest, THRESHOLD), attributes={})]
        return
    softmax = links.producers[test.inputs[0]]
    scores, largest = softmax.inputs[0], f"{output}_largest"
    axis = softmax.axis(links.graph.shapes[scores].rank)
    shape = links.graph.shapes[scores].with_length(axis, 1)
    changes.shapes |= {largest: shape, output: shape}
    changes.dtypes[largest] = np.dtype("float32")
    changes.nodes[output] = [
        Node("ReduceMax", "", test.name, (scores,), (largest,), {"axes": [axis], "keepdims": 1}),
        Node("LessOrEqual", "", test.name, (largest, THRESHOLD), (output,)),
    ]


def _changed(graph: Graph, changes: _Changes) -> Graph:
    nodes = (new for node in graph.nodes for new in changes.nodes.get(node.outputs[0], [node]))
    copies = {_softened(name): name for name in graph.constants if _softened(name) in changes.constants}
    return graph.extended(nodes, changes.constants, changes.shapes, changes.dtypes, copies)
