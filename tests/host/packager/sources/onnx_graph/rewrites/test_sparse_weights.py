"""Sparse weights become dense, because only ONNX Runtime supports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

DENSE = np.array([[0, 2, 0], [3, 0, 0], [0, 0, 4], [0, 5, 0]], np.float32)


@pytest.mark.parametrize("flat", [True, False])
def test_sparse_weights_and_sparse_constants_become_dense(flat: bool, tmp_path: Path) -> None:
    proto = models.model("float[N,4] x) => (float[N,3] y", "a = MatMul(x, w)\n b = MatMul(x, c)\n y = Add(a, b)")
    places = np.flatnonzero(DENSE) if flat else np.argwhere(DENSE)
    sparse = onnx.SparseTensorProto(dims=DENSE.shape)
    sparse.values.CopyFrom(onnx.numpy_helper.from_array(DENSE[DENSE != 0], "w"))
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(places.astype(np.int64), "places"))
    proto.graph.sparse_initializer.append(sparse)
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["c"], sparse_value=sparse))
    found = load_source(models.write(proto, tmp_path / "m.onnx")).proto
    assert not found.graph.sparse_initializer
    (weights,) = (one for one in found.graph.initializer if one.name == "w")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(weights), DENSE)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(found.graph.node[0].attribute[0].t), DENSE)
