"""Nodes, graphs and constants are found at every level of a model. A name with two values is no constant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.nodes import (
    Constants,
    drop_repeated_names,
    graphs_of,
    nodes_of,
    refill,
    tensors,
)
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import ranges_of
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models

# An If inside an If, as in scripted models.
NESTED = """
    zero = Constant <value = float {0.0}> ()
    total = ReduceSum <keepdims = 0> (x)
    above = Greater (total, zero)
    y = If (above) <
        then_branch = then () => (float[N, 4] t) {
            t = If (above) <
                then_branch = inner () => (float[N, 4] i) { one = Constant <value = float {1.0}> ()  i = Add (x, one) },
                else_branch = never () => (float[N, 4] n) { n = Neg (x) }
            >
        },
        else_branch = other () => (float[N, 4] o) { o = Identity (x) }
    >
"""


def branches(then: str, other: str) -> Any:
    """Return a model with an `If` on the sum of `x`."""
    return models.model(
        "float[N,4] x) => (float[N,4] y",
        f"""
        zero = Constant <value = float {{0.0}}> ()
        total = ReduceSum <keepdims = 0> (x)
        above = Greater (total, zero)
        y = If (above) <
            then_branch = then () => (float[N, 4] t) {{ {then} }},
            else_branch = other () => (float[N, 4] o) {{ {other} }}
        >
        """,
    )


def branch_of(proto: Any, name: str) -> Any:
    return next(graph for graph in graphs_of(proto.graph) if graph.name == name)


def test_nodes_and_subgraphs_are_found_at_every_depth() -> None:
    proto = models.model("float[N,4] x) => (float[N,4] y", NESTED)
    assert [graph.name for graph in graphs_of(proto.graph)] == ["test", "then", "inner", "never", "other"]
    kinds = [node.op_type for node in nodes_of(proto.graph)]
    assert sorted(kinds) == sorted(
        ["Constant", "ReduceSum", "Greater", "If", "If", "Constant", "Add", "Neg", "Identity"]
    )


def test_tensors_are_found_in_initializers_and_in_attributes_and_in_branches() -> None:
    proto = models.model("float[N,4] x) => (float[N,4] y", NESTED, {"w": models.random(3)})
    assert sorted(tuple(tensor.dims) for tensor in tensors(proto)) == [(), (), (3,)]
    assert list(tensors(models.model("float[N,4] x) => (float[N,4] y", "y = Neg (x)"))) == []


def test_a_repeated_field_can_be_refilled_with_its_own_elements_in_another_order() -> None:
    graph = models.mlp().graph
    first, *others = [node.op_type for node in graph.node]
    refill(graph.node, [*graph.node[1:], graph.node[0]])
    assert [node.op_type for node in graph.node] == [*others, first]
    refill(graph.node, [])
    assert list(graph.node) == []


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("value = float {0.5}", np.float32(0.5)),
        ("value = int8[3] {-1, 0, 1}", np.array([-1, 0, 1], np.int8)),
        ("value_float = 0.5", np.float32(0.5)),
        ("value_floats = [0.5, -1.5]", np.array([0.5, -1.5], np.float32)),
        ("value_int = -3", np.int64(-3)),
        ("value_ints = [1, 2, 3]", np.array([1, 2, 3], np.int64)),
    ],
)
def test_every_form_of_a_number_in_a_constant_node_is_read_with_its_type(attribute: str, value: Any) -> None:
    constants = Constants(models.model("float[N,4] x) => (float[N,4] y", f"c = Constant <{attribute}> ()  y = Neg (x)"))
    found = constants.get("c")
    assert "c" in constants
    assert found is not None
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(found, value)


def test_neither_a_computed_value_nor_an_input_nor_a_text_is_a_constant() -> None:
    proto = models.model(
        "float[N,4] x) => (float[N,4] y", 'c = Constant <value_string = "s"> ()  y = Neg (x)', {"w": models.random(3)}
    )
    constants = Constants(proto)
    assert [name for name in ("x", "y", "c", "w", "none", "") if name in constants] == ["w"]
    assert [constants.get(name) for name in ("x", "y", "c", "none", "")] == [None] * 5


def test_an_empty_constant_is_a_constant() -> None:
    constants = Constants(
        models.model("float[N,4] x) => (float[N,4] y", "y = Neg (x)", {"e": np.zeros((0, 4), np.float32)})
    )
    found = constants.get("e")
    assert found is not None
    assert found.shape == (0, 4)


def test_a_name_that_two_branches_use_for_different_values_is_not_a_constant() -> None:
    same = "c = Constant <value = float {1.0}> ()"
    proto = branches(f"{same}  d = Constant <value = float {{1.0}}> ()  e = Neg (x)  t = Mul (e, d)",
                     f"{same}  d = Constant <value = float {{2.0}}> ()  e = Constant <value_float = 2.0> ()  o = Mul (x, e)")  # fmt: skip
    constants = Constants(proto)
    assert [name for name in ("zero", "c", "d", "e") if name in constants] == ["zero", "c"]
    assert constants.get("d") is constants.get("e") is None


def test_a_bound_of_one_branch_is_kept_although_the_other_branch_has_an_infinite_bound(tmp_path: Path) -> None:
    from onnx import numpy_helper

    clip = "low = Constant <value = float {-1.0}> ()"
    proto = branches(f"{clip}  t = Clip (x, low)", f"{clip}  o = Clip (x, low)")
    branch_of(proto, "other").node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(-np.inf)))
    assert [name for name in ("zero", "low") if name in Constants(proto)] == ["zero"]
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    above, below = np.array([[9, -2, -3, 4], [-9, -2, -3, 4]], np.float32)[:, None]
    for values, want in ((above, [[9, -1, -1, 4]]), (below, below)):
        np.testing.assert_array_equal(reference_outputs(source, CalibrationSet({"x": values}, None))[0], want)


def test_a_scale_that_is_written_as_a_plain_number_is_read_as_a_constant() -> None:
    body = "s = Constant <value_float = 0.5> ()  q = QuantizeLinear (x, s)  d = DequantizeLinear (q, s)  y = Relu (d)"
    assert ranges_of(models.model("float[N,4] x) => (float[N,4] y", body))["x"] == (0.0, 127.5)


def test_a_model_is_read_although_nodes_have_the_same_name(tmp_path: Path) -> None:
    """ONNX Runtime refuses such a model."""
    proto = models.mlp()
    assert not drop_repeated_names(proto)
    for node in proto.graph.node:
        node.name = "layer"
    names = [node.name for node in load_source(models.write(proto, tmp_path / "m.onnx")).proto.graph.node]
    assert names == ["layer", *[""] * (len(names) - 1)]
