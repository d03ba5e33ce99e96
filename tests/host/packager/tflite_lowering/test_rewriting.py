"""Links between the nodes of a graph, and the replacement of nodes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import OPS
from edgert_deploy.packager.tflite_lowering.graph import Graph, read_graph
from edgert_deploy.packager.tflite_lowering.rewriting import Links, replaced
from tests.support.models.tflite_cases import TOKENS, Case, model_of


def graph_of(body: str) -> Graph:
    return read_graph(model_of(Case("links", body, TOKENS, {"half": np.float32(0.5)})), OPS)


def test_the_only_reader_of_a_value_is_found() -> None:
    graph = graph_of("a = Exp(x) b = Sin(a) c = Cos(a) y = Add(b, c)")
    links = Links(graph)
    of = links.producers
    assert links.only_user(of["a"]) is None  # two readers
    assert links.only_user(of["b"]) is of["y"]
    assert links.only_user(of["y"]) is None  # an output of the model


def test_a_scalar_operand_is_found_on_either_side() -> None:
    links = Links(graph_of("a = Mul(half, x) y = Exp(a)"))
    (product,) = (node for node in links.graph.nodes if node.op_type == "Mul")
    assert links.operand_beside(product, 0.5) == "x"
    assert links.operand_beside(product, 0.6) is None


def test_nodes_are_replaced_or_dropped_by_their_result() -> None:
    graph = graph_of("a = Exp(x) y = Sin(a)")
    first, last = graph.nodes
    assert replaced(graph, {"a": None}).nodes == (last,)
    assert replaced(graph, {"y": first}).nodes == (first, first)
