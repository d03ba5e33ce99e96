"""`If` nodes: a branch that is known at the build replaces the node; the others stay, and TFLite refuses them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import OperatorUnsupported
from edgert_deploy.packager.sources.branches import inline_known_branches
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import builders, models

SIGNATURE = "float[N,4] x) => (float[N,4] y"
BRANCHES = """<
    then_branch = t () => (float[N,4] a) { m = Relu(h) a = Add(m, bias) },
    else_branch = e () => (float[N,4] b) { m = Tanh(h) b = Sub(m, bias) }>"""
# Whether there are 4 columns, whether there are more than 2 rows, and whether the values are positive.
CONDITIONS = {
    "columns": "s = Shape <start = 1> (x) f = Constant <value = int64[1] {4}> () q = Equal(s, f) c = Squeeze(q)",
    "rows": "s = Shape <end = 1> (x) f = Constant <value = int64[1] {2}> () q = Greater(s, f) c = Squeeze(q)",
    "values": "s = ReduceSum <keepdims = 0> (x) f = Constant <value = float {0.0}> () c = Greater(s, f)",
}


def model(condition: str, then: str = "y = Identity(z)") -> Any:
    weights = {"k": models.random(4, 4), "bias": models.random(4)}
    body = f"{CONDITIONS[condition]} h = MatMul(x, k) z = If (c) {BRANCHES} {then}"
    proto = models.model(SIGNATURE, body, weights)
    for node in proto.graph.node:
        node.name = "choice" if list(node.output) == ["z"] else ""
    return proto


def kinds(proto: Any) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def answers(proto: Any, rows: int) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": models.random(rows, 4)})[0]


def test_a_branch_that_shapes_choose_replaces_the_node_and_what_asked() -> None:
    proto = model("columns")
    assert inline_known_branches(proto)
    assert kinds(proto) == ["MatMul", "Relu", "Add", "Identity", "Identity"]
    for rows in (1, 5):
        np.testing.assert_array_equal(answers(proto, rows), answers(model("columns"), rows))
    assert not inline_known_branches(proto)


@pytest.mark.parametrize("condition", ["rows", "values"])
def test_a_branch_that_the_batch_or_the_data_choose_stays(condition: str) -> None:
    proto = model(condition)
    assert not inline_known_branches(proto)
    assert proto == model(condition)


def test_branches_inside_branches_and_equal_names_in_two_nodes_are_kept_apart() -> None:
    """The second node has the names of the first in its own branches; its condition needs the first one's answer."""
    nested = """
        s2 = Shape <start = 1> (z) q2 = Equal(s2, f) c2 = Squeeze(q2)
        y = If (c2) <
            then_branch = t () => (float[N,4] g) {
                m = Sigmoid(z)
                g = If (c2) <then_branch = u () => (float[N,4] i) { i = Mul(m, bias) },
                             else_branch = v () => (float[N,4] j) { j = Neg(m) }>
            },
            else_branch = e () => (float[N,4] b) { b = Neg(z) }>"""
    proto = model("columns", nested)
    assert inline_known_branches(proto)
    assert "If" not in kinds(proto)
    np.testing.assert_array_equal(answers(proto, 3), answers(model("columns", nested), 3))


def test_tflite_takes_a_known_branch_and_refuses_another_by_its_node(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    source = load_source(models.write(model("columns"), tmp_path / "known.onnx"))
    samples = builders.samples_for(source)
    assert builders.build("tflite", source, samples, "fp32", tmp_path / "known").kind == "fp32"
    other = load_source(models.write(model("values"), tmp_path / "other.onnx"))
    with pytest.raises(OperatorUnsupported, match=r"If \(node 'choice'\): TFLite has no such operator"):
        builders.build("tflite", other, samples, "fp32", tmp_path / "other")
    for engine in ("onnxruntime", "tensorrt"):
        assert builders.build(engine, other, samples, "fp32", tmp_path / engine).kind == "fp32"
