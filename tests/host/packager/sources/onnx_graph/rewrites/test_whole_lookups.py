"""A lookup of all rows in order becomes a Reshape.

Attention masks of language models have such lookups.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.rewrites.whole_lookups import reshape_whole_lookups
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import builders, models


def masked(index: str = "i = Add(rows, columns)") -> Any:
    """Return a model that reads mask[row, column] for 5 columns, like torch.onnx.export."""
    body = f"""
        flat = Flatten <axis = 2> (mask)
        s = Shape(mask) n = Gather(s, zero) zero_to_n = Range(zero, n, one)
        by_row = Mul(zero_to_n, five) rows = Unsqueeze(by_row, axes) columns = Range(zero, five, one)
        {index}
        picked = Gather <axis = 0> (flat, i)
        shape = Shape(i) kept = Reshape(picked, shape)
        sums = ReduceSum <keepdims = 0> (kept, last) y = Add(x, sums)
    """
    weights = {"zero": 0, "one": 1, "five": 5, "axes": [1, 2], "last": [2]}
    constants = {name: np.array(value, np.int64) for name, value in weights.items()}
    return models.model("float[N,5] mask, float[N,1] x) => (float[N,1] y", body, constants)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tflite"])
def test_each_engine_runs_a_whole_look_up_with_an_open_batch(tmp_path: Path, engine: str) -> None:
    source = load_source(models.write(masked(), tmp_path / "m.onnx"))
    assert {node.op_type for node in source.proto.graph.node if "picked" in node.output} == {"Reshape"}
    samples = CalibrationSet({"mask": models.random(16, 5), "x": models.random(16, 1)}, None)
    (answers,) = artifact_outputs(builders.build(engine, source, samples, "fp32", tmp_path), source, samples)
    np.testing.assert_allclose(answers, samples.inputs["x"] + samples.inputs["mask"].sum(1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    "index",
    ["i = Sub(rows, columns)", "a = Add(rows, columns) i = Mul(a, zero)", "i = Add(rows, axes)"],
    ids=["backwards", "one-row", "some-columns"],
)
def test_other_look_ups_stay_unchanged(index: str) -> None:
    proto = masked(index)
    assert not reshape_whole_lookups(proto)
    assert proto == masked(index)
