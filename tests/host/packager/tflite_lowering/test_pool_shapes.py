"""Shapes of pools that round the number of their windows up."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering.pool_shapes import infer_shapes
from tests.support.models.tflite_cases import Case, model_of


@pytest.mark.parametrize(
    ("attributes", "length"),
    [("ceil_mode=1", 5), ("ceil_mode=0", 4), ("ceil_mode=1, pads=[0,0,0,1]", 5), ("ceil_mode=1, pads=[0,0,0,0]", 5)],
)
def test_no_window_begins_in_the_padding_after_the_last_element(attributes: str, length: int) -> None:
    body = f"y = MaxPool<kernel_shape=[1,2], strides=[1,2], {attributes}>(x)"
    model = infer_shapes(model_of(Case("pool", body, {"x": (2, 3, 9)}), batch="1"))
    (output,) = model.graph.output
    assert [dim.dim_value for dim in output.type.tensor_type.shape.dim] == [1, 2, 3, length]
    assert "ceil_mode" in [a.name for a in model.graph.node[0].attribute]  # the node itself does not change
