"""Replaces sparse weights by dense ones.

ONNX Runtime makes them dense when it loads a model. But ONNX's checker, its quantizer and the other engines do not
support them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.nodes import graphs_of, nodes_of


def make_dense(proto: Any) -> bool:
    """Make the sparse weights of a model dense, in place; return whether there were any."""
    found = False
    for graph in graphs_of(proto.graph):
        graph.initializer.extend(_dense(sparse) for sparse in graph.sparse_initializer)
        found |= bool(graph.sparse_initializer)
        del graph.sparse_initializer[:]
    for node in nodes_of(proto.graph):
        for attribute in node.attribute:
            if attribute.name == "sparse_value":
                attribute.name, attribute.type, found = "value", attribute.TENSOR, True
                attribute.t.CopyFrom(_dense(attribute.sparse_tensor))
                attribute.ClearField("sparse_tensor")
    return found


def _dense(sparse: Any) -> Any:
    from onnx import numpy_helper

    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    dense[tuple(indices.T) if indices.ndim == 2 else np.unravel_index(indices, dense.shape)] = values
    return numpy_helper.from_array(dense, sparse.values.name)
