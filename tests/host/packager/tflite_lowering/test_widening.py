"""Casts around arithmetic of small integers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import OPS, lower
from edgert_deploy.packager.tflite_lowering.graph import read_graph
from edgert_deploy.packager.tflite_lowering.widening import widen
from tests.support.models.tflite_cases import Case, model_of, run_tflite


def bytes_case(body: str) -> Case:
    return Case("bytes", body, {"x": (4,)}, {"k": np.uint8(200)}, types={"x": "uint8"}, outputs="uint8 y")


def test_arithmetic_of_bytes_is_cast_and_wraps_around() -> None:
    case = bytes_case("y = Add(x, k)")
    graph = widen(read_graph(model_of(case), OPS), OPS)
    assert [node.op_type for node in graph.nodes] == ["Cast", "Add", "Cast"]
    assert {str(graph.dtypes[name]) for name in graph.nodes[1].inputs} == {"int32"}
    inputs = {"x": np.array([[0, 55, 56, 255]], np.uint8)}
    np.testing.assert_array_equal(run_tflite(lower(model_of(case)), inputs)[0], [[200, 255, 0, 199]])


def test_a_node_that_reads_a_result_gets_the_wrapped_value() -> None:
    case = bytes_case("s = Add(x, k) y = Div(s, two)")
    case = replace(case, constants={**case.constants, "two": np.uint8(2)})
    inputs = {"x": np.array([[0, 55, 56, 255]], np.uint8)}
    np.testing.assert_array_equal(run_tflite(lower(model_of(case)), inputs)[0], [[100, 127, 0, 99]])


def test_operators_that_only_move_bytes_stay_unchanged() -> None:
    graph = read_graph(model_of(bytes_case("y = Concat<axis=1>(x, x)")), OPS)
    assert widen(graph, OPS).nodes == graph.nodes
