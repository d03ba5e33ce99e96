"""Einsum refuses dtypes for which TFLite has no matrix product."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import OperatorUnsupported
from edgert_deploy.packager.tflite_lowering import lower
from tests.support.models.tflite_cases import Case, model_of


def test_an_einsum_of_integers_is_refused() -> None:
    case = Case(
        "integers", 'y = Einsum<equation="bi,bj->bij">(x, x)', {"x": (3,)}, types={"x": "int64"}, outputs="int64 y"
    )
    with pytest.raises(OperatorUnsupported, match="int64"):
        lower(model_of(case))
