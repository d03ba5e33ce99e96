"""The structure of a model keeps everything that shape inference needs, but no large weights."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")

from edgert_deploy.packager.sources.onnx_graph.structure import SHAPE_VALUES_MAX, opset_of, sort_nodes, structure_of
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models


def test_large_weights_become_inputs_and_short_constants_stay() -> None:
    weights = {"short": models.random(SHAPE_VALUES_MAX), "large": models.random(SHAPE_VALUES_MAX + 1)}
    proto = models.model("float[N,1] x) => (float[N,K] y", "a = Add (x, short)  y = Add (x, large)", weights)
    before = proto.SerializeToString()
    graph = structure_of(proto).graph
    assert [tensor.name for tensor in graph.initializer] == ["short"]
    assert [value.name for value in graph.input] == ["x", "large"]
    assert graph.input[1].type.tensor_type.shape.dim[0].dim_value == SHAPE_VALUES_MAX + 1
    assert proto.SerializeToString() == before


def test_a_weight_that_is_also_listed_as_an_input_stays_one_input() -> None:
    from onnx import helper

    proto = models.model("float[N,2000] x) => (float[N,2000] y", "y = Add (x, w)", {"w": models.random(2000)})
    proto.graph.input.append(helper.make_tensor_value_info("w", 1, [2000]))
    assert [value.name for value in structure_of(proto).graph.input] == ["x", "w"]


def test_the_opset_is_found_under_either_name_of_the_standard_domain() -> None:
    proto = models.mlp()
    assert opset_of(proto) == 17
    proto.opset_import[0].domain = "ai.onnx"
    assert opset_of(proto) == 17
    proto.opset_import[0].domain = "com.microsoft"
    assert opset_of(proto) == 0


def test_nodes_are_sorted_if_a_converter_put_a_cast_last(tmp_path: Path) -> None:
    """Ultralytics' export with half=True writes such a model, and ONNX Runtime reads it."""
    body = "a = Add (c, w)  b = Relu (a)  y = Add (b, c)  c = Cast<to=1> (x)"
    proto = models.model("float16[N,8] x) => (float[N,8] y", body, {"w": models.random(8)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert [node.op_type for node in source.proto.graph.node][-3:] == ["Add", "Relu", "Add"]
    assert sort_nodes(proto)
    assert [node.output[0] for node in proto.graph.node] == ["c", "a", "b", "y"]
    assert not sort_nodes(proto)


def test_nodes_in_a_cycle_keep_their_order() -> None:
    proto = models.model("float[N,8] x) => (float[N,8] y", "a = Add (x, b)  b = Relu (a)  y = Relu (b)")
    assert not sort_nodes(proto)
    assert [node.output[0] for node in proto.graph.node] == ["a", "b", "y"]
