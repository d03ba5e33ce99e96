"""Replaces MediaPipe's custom transposed convolution by TFLite's own operator.

MediaPipe's segmentation models have this operator. XNNPACK computes it, but TFLite's quantizer does not know it, and an
interpreter without XNNPACK refuses it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgert_deploy.packager.tflite_lowering.tables import add_buffer, add_tensor, packed, unpacked

TRANSPOSED_WITH_BIAS = b"Convolution2DTransposeBias"
VERSION = 3  # of a TRANSPOSE_CONV with a bias
SAME = 1  # in the custom options, which are three INT32: padding, stride_width and stride_height


def with_builtin_operators(content: bytes) -> bytes:
    """Replace each Convolution2DTransposeBias by a TRANSPOSE_CONV; return the file."""
    if TRANSPOSED_WITH_BIAS not in content:
        return content
    model = unpacked(content)
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.TRANSPOSE_CONV
    code.version = VERSION
    for graph in model.subgraphs:
        for operator in graph.operators:
            if model.operatorCodes[operator.opcodeIndex].customCode == TRANSPOSED_WITH_BIAS:
                image, weights, bias = operator.inputs
                operator.inputs = np.array(
                    [_shape_of(model, graph, operator.outputs[0]), weights, image, bias], np.int32
                )
                operator.builtinOptionsType = schema.BuiltinOptions.TransposeConvOptions
                operator.builtinOptions, operator.customOptions = _options(operator.customOptions), None
                operator.opcodeIndex = len(model.operatorCodes)
    model.operatorCodes.append(code)
    return packed(model)


def _options(custom: Any) -> Any:
    padding, width, height = np.frombuffer(bytes(custom), np.int32)[:3]
    options = schema.TransposeConvOptionsT()
    options.padding = schema.Padding.SAME if padding == SAME else schema.Padding.VALID
    options.strideW, options.strideH = int(width), int(height)
    return options


def _shape_of(model: Any, graph: Any, tensor: int) -> int:
    """Add a constant with the shape of `tensor`; return its index."""
    shape = np.asarray(graph.tensors[tensor].shape, np.int32)
    name, length = graph.tensors[tensor].name + b"_shape", np.array([len(shape)], np.int32)
    return add_tensor(graph, name, "INT32", length, buffer=add_buffer(model, shape))
