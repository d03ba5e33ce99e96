"""The graph of a lowering knows which axes and constants depend on the batch."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import OPS
from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Graph, read_graph
from tests.support.models.lowering_cases import case_named
from tests.support.models.tflite_cases import model_of


def graph_of(name: str) -> Graph:
    return read_graph(model_of(case_named(name)), OPS)


def test_an_axis_that_grows_with_the_batch_is_open() -> None:
    graph = graph_of("reshape merges the batch")
    assert graph.shapes["x"] == BatchShape((1, 5, 8), (-1, 5, 8))
    assert graph.shapes["r"].signature == (-1, 8)


def test_a_constant_that_only_repeats_along_the_batch_is_expanded() -> None:
    graph = graph_of("class token")
    assert len(graph.batch_constants) == 1
    assert graph.expanded_constants == graph.batch_constants == graph.repeated_constants


def test_shapes_are_permuted_and_reduced_and_padded_with_their_open_axis() -> None:
    shape = BatchShape((1, 3, 4), (-1, 3, 4))
    assert shape.permuted((2, 0, 1)) == BatchShape((4, 1, 3), (4, -1, 3))
    assert shape.with_axis(1, 7).reduced([1], keep=False) == shape
    assert shape.reduced([1, 2]) == BatchShape((1, 1, 1), (-1, 1, 1))
    assert shape.padded([(0, 0), (1, 2), (0, -1)]) == BatchShape((1, 6, 3), (-1, 6, 3))
    assert shape.with_length(0, 5) == BatchShape((5, 3, 4), (5, 3, 4))
