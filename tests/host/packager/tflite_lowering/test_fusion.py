"""Groups of nodes become one node, for which TFLite has an operator."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering.fusion import fuse
from edgert_deploy.packager.tflite_lowering.graph import read_graph
from edgert_deploy.packager.tflite_lowering.ops import OPS
from tests.support.models.lowering_cases import case_named
from tests.support.models.tflite_cases import model_of


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("gelu spelled out", ["Gelu"]),
        ("gelu half first", ["Gelu"]),
        ("gelu half in the middle", ["Gelu"]),
        ("hard swish", ["HardSwish"]),
        ("batch normalization folded", ["Conv"]),
        ("conv relu6", ["Conv"]),
        ("gemm relu", ["Gemm"]),
        ("conv relu shared", ["Conv", "Relu", "Add"]),
    ],
)
def test_groups_of_nodes_are_fused_into_one_node(name: str, fused: list[str]) -> None:
    assert [node.op_type for node in fuse(read_graph(model_of(case_named(name)), OPS), OPS).nodes] == fused
