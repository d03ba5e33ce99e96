"""tf2onnx writes Erfc, although ONNX lacks this operator."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.nodes import nodes_of
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models

BRANCHES = """
    zero = Constant <value = float {0.0}> ()
    total = ReduceSum <keepdims = 0> (x)
    above = Greater (total, zero)
    y = If (above) <
        then_branch = then () => (float[N, 4] t) { e = Erf (x)  t = Neg (e) },
        else_branch = other () => (float[N, 4] o) { f = Erf (x)  o = Identity (f) }
    >
"""


def with_erfc(body: str) -> Any:
    """Return the model of `body` with Erfc instead of Erf. ONNX's parser refuses Erfc itself."""
    proto = models.model("float[N,4] x) => (float[N,4] y", body)
    for node in nodes_of(proto.graph):
        if node.op_type == "Erf":
            node.op_type = "Erfc"
    return proto


@pytest.mark.parametrize("body", ["e = Erf(x) y = Neg(e)", BRANCHES])
def test_the_erfc_of_tensorflow_is_replaced_by_operators_of_onnx(body: str, tmp_path: Path) -> None:
    source = load_source(models.write(with_erfc(body), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": 0.1 + np.abs(models.random(12, 4))}, None)
    want = [[-math.erfc(value) for value in row] for row in samples.inputs["x"].tolist()]
    np.testing.assert_allclose(reference_outputs(source, samples)[0], want, atol=1e-6)
