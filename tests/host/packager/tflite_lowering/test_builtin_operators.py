"""MediaPipe's custom transposed convolution becomes a built-in operator with the same answers."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.builtin_operators import TRANSPOSED_WITH_BIAS, with_builtin_operators
from edgert_deploy.packager.tflite_lowering.tables import code_of, packed, unpacked
from tests.support.models.tflite_cases import Case, inputs_of, model_of, random, run_tflite

# A convolution with a kernel of 1 x 1 and a stride of 1 is its own transpose.
CONVOLUTION = Case("conv", "y = Conv(x, w, b)", {"x": (4, 8, 6)}, {"w": random(5, 4, 1, 1), "b": random(5)})


def test_a_transposed_convolution_of_mediapipe_keeps_its_answers() -> None:
    content, inputs = lower(model_of(CONVOLUTION)), inputs_of(CONVOLUTION, 1)
    changed = unpacked(with_builtin_operators(with_custom_operator(content)))
    operators = {code_of(changed, one): one for one in changed.subgraphs[0].operators}
    assert schema.BuiltinOperator.CUSTOM not in operators
    options = operators[schema.BuiltinOperator.TRANSPOSE_CONV].builtinOptions
    assert (options.padding, options.strideW, options.strideH) == (schema.Padding.VALID, 1, 1)
    np.testing.assert_allclose(
        run_tflite(packed(changed), inputs)[0], run_tflite(content, inputs)[0], rtol=1e-5, atol=1e-5
    )
    assert with_builtin_operators(content) is content


def with_custom_operator(content: bytes) -> bytes:
    """Return the file with MediaPipe's operator in place of its convolution."""
    model = unpacked(content)
    operator = next(
        one for one in model.subgraphs[0].operators if code_of(model, one) == schema.BuiltinOperator.CONV_2D
    )
    code = model.operatorCodes[operator.opcodeIndex]
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode, code.version = TRANSPOSED_WITH_BIAS, 1
    operator.builtinOptions, operator.builtinOptionsType = None, 0
    operator.customOptions = np.array([2, 1, 1], np.int32).view(np.uint8)  # VALID, a stride of 1 and 1
    return packed(model)
