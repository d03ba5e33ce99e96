"""Full-INT8 post-training quantization of a float .tflite, by TFLite's own quantizer.

The quantizer ships inside ai-edge-litert as a private module; TensorFlow's TFLiteConverter uses the same code. Weights
have a scale per channel. An activation has one scale, from its range over the samples. Inputs and outputs keep
their dtypes, because the file itself quantizes its inputs and dequantizes its outputs. An operator without an INT8
kernel stays in float32, between a DEQUANTIZE and a QUANTIZE. The quantizer is native code and crashes on some models,
so builders run in child processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert.errors import BuildFailed
from edgert_deploy.packager.tflite_lowering.calibrate import Ranges
from edgert_deploy.packager.tflite_lowering.tables import code_of, packed, unpacked
from edgert_deploy.packager.tflite_lowering.writer import FLOAT_MARK, operator_code

# The releases of ai-edge-litert in which the private module was tested. Their results are identical.
KNOWN_GOOD = "2.1.6, 2.2.0 and 2.3.0"
# An activation with a smaller range counts as constant zero. Examples: a dead branch, or a mask that masks nothing.
RANGE_MIN = 1e-30
# Scores below LOW_SCORE are masked (masking.py sets them to -1e4). In INT8, these scores become MASKED_SCORE. The
# exponential of MASKED_SCORE is 1e-14, compared with 1 for a score of 0.
LOW_SCORE = -5e3
MASKED_SCORE = -32.0
# tflite-runtime 2.14 has no INT8 form of these operators. In float, every runtime loads them.
NEWER_THAN_DEVICES = frozenset(getattr(schema.BuiltinOperator, name) for name in ("LOG", "SQRT"))
# The INT8 kernel of this operator is the slow reference kernel: a network with many PRELUs ran at a tenth of the speed
# of FP32.
SLOW_IN_INT8 = frozenset({schema.BuiltinOperator.PRELU})
# The INT8 kernels of these operators abort if an input has a scale of 1 (tflite/kernels/comparisons.cc). A constant 0
# has this scale.
COMPARISONS = frozenset(
    getattr(schema.BuiltinOperator, name)
    for name in ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
)
# The quantizer has no INT8 form of this operator. `_hidden` gives its code to each operator that must stay in float.
LEFT_ALONE = "CEIL"


def quantize_int8(
    float_model: bytes,
    samples: Iterable[Sequence[NDArray[Any]]],
    is_float: Callable[[str], bool] = lambda name: False,
    own_ranges: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    cut: float = 0.0,
) -> bytes:
    """Return `float_model` in INT8. The same arguments give the same bytes.

    Args:
        samples: The calibration samples, each with one array per input, in the model's order.
        is_float: Gets the name of an operator's first output; returns whether the operator stays in float.
        own_ranges: The ranges from training with quantization: name of a tensor -> (lowest, highest) value.
        cut: The share of an activation's values that its range leaves out at either end.

    Raises BuildFailed.
    """
    wrapper = _calibration_wrapper()
    try:
        calibrated = bytes(_usable(_calibrated(wrapper, float_model, samples, cut), own_ranges))
        calibrated, hidden = _hidden(calibrated, is_float)
        # The wrapper keeps no reference to its input: `calibrated` must stay a variable of this frame.
        quantized = bytes(
            wrapper(calibrated, [], []).QuantizeModel(
                np.dtype("float32").num,  # the dtype of inputs
                np.dtype("float32").num,  # the dtype of outputs
                True,  # operators without an INT8 kernel stay float
                np.dtype("int8").num,  # the dtype of activations
                np.dtype("int32").num,  # the dtype of biases
                False,  # do not disable per-channel scales
                False,  # do not disable per-channel scales of fully connected layers
            )
        )
    except (RuntimeError, ValueError, TypeError) as error:
        raise BuildFailed(
            f"TFLite's quantizer refused the model: {error}; EdgeRT was tested with ai-edge-litert {KNOWN_GOOD}. "
            "Build this target with --precision fp32, or for another engine"
        ) from error
    return _undisguised(quantized, hidden)


def _calibrated(wrapper: Any, float_model: bytes, samples: Iterable[Sequence[NDArray[Any]]], cut: float) -> bytearray:
    """Return the float model with the recorded range of each activation."""
    calibrator, ranges = wrapper(float_model, [], []), Ranges(float_model, cut)
    prepared = False
    for arrays in samples:
        ordered = [np.ascontiguousarray(array) for array in arrays]
        if not prepared:  # one run of TFLite's calibrator adds the fields for the ranges
            calibrator.Prepare([list(array.shape) for array in ordered])
            calibrator.FeedTensor(ordered)
            ranges.prepare(ordered)
            prepared = True
        ranges.watch(ordered)
    assert prepared, "no sample was given"
    calibrated = bytearray(calibrator.Calibrate())
    ranges.write(calibrated)
    return calibrated


def _hidden(calibrated: bytes, is_float: Callable[[str], bool]) -> tuple[bytes, dict[str, tuple[Any, int, Any]]]:
    """Replace the operators that stay in float by LEFT_ALONE; return the model and the replaced operators.

    TFLite's quantizer accepts no list of exceptions. Its successor accepts such a list, but needs TensorFlow. However,
    the quantizer leaves every operator without an INT8 form in float, and adds a DEQUANTIZE and a QUANTIZE where
    necessary.
    """
    model = unpacked(calibrated)
    graph, hidden = model.subgraphs[0], {}
    for operator in graph.operators:
        name = graph.tensors[operator.outputs[0]].name.decode()
        code, kind = model.operatorCodes[operator.opcodeIndex], code_of(model, operator)
        if kind == schema.BuiltinOperator.CEIL:
            continue
        if kind not in NEWER_THAN_DEVICES | SLOW_IN_INT8 | COMPARISONS and not (FLOAT_MARK in name or is_float(name)):
            continue
        hidden[name] = (code, operator.builtinOptionsType, operator.builtinOptions)
        operator.opcodeIndex = len(model.operatorCodes)
        operator.builtinOptionsType, operator.builtinOptions = schema.BuiltinOptions.NONE, None
    if not hidden:
        return calibrated, hidden
    model.operatorCodes.append(operator_code(LEFT_ALONE))
    return packed(model), hidden


def _undisguised(quantized: bytes, hidden: dict[str, tuple[Any, int, Any]]) -> bytes:
    if not hidden:
        return quantized
    model = unpacked(quantized)
    graph, indices = model.subgraphs[0], dict[int, int]()
    for operator in graph.operators:
        known = hidden.get(graph.tensors[operator.outputs[0]].name.decode())
        if model.operatorCodes[operator.opcodeIndex].builtinCode != schema.BuiltinOperator.CEIL or known is None:
            continue
        code, operator.builtinOptionsType, operator.builtinOptions = known
        if id(code) not in indices:
            indices[id(code)] = len(model.operatorCodes)
            model.operatorCodes.append(code)
        operator.opcodeIndex = indices[id(code)]
    return packed(model)


def _usable(calibrated: bytearray, own_ranges: Mapping[str, tuple[float, float]]) -> bytearray:
    """Adapt the ranges of `calibrated` to INT8, in place.

    Raises BuildFailed for a range that is not finite.

    `own_ranges` replace recorded ranges, so that the quantizer reproduces the original scales. A tensor that is always
    zero gets a range, because TFLite aborts at a scale of zero. Masked scores saturate at MASKED_SCORE, so the other
    scores can use the 255 steps.
    """
    model = schema.Model.GetRootAs(calibrated, 0)
    graph, masked = model.Subgraphs(0), _masked_scores(model)
    for index in masked:
        lows = _lows(model, index)
        np.maximum(lows, np.float32(MASKED_SCORE), out=lows)
    for tensor in map(graph.Tensors, range(graph.TensorsLength())):
        quantization = tensor.Quantization()
        if quantization is None or quantization.MaxLength() != 1:
            continue
        low, high = quantization.MinAsNumpy(), quantization.MaxAsNumpy()
        # The tensor of a value in a second layout has a number at the end of its name.
        if (known := own_ranges.get(re.sub(r"__\d+$", "", tensor.Name().decode()))) is not None:
            low[0], high[0] = known
        if not np.isfinite([low[0], high[0]]).all():
            name = tensor.Name().decode()
            raise BuildFailed(
                f"{name!r} is not finite on a calibration sample; check the samples, or build with --precision fp32"
            )
        if max(high[0], 0) - min(low[0], 0) < RANGE_MIN:
            high[0] = low[0] + 1
    return calibrated


def _masked_scores(model: Any) -> set[int]:
    """Return the tensors with very low values through which a mask reaches a SOFTMAX."""
    graph = model.Subgraphs(0)
    operators = [graph.Operators(i) for i in range(graph.OperatorsLength())]
    producers = {int(output): operator for operator in operators for output in operator.OutputsAsNumpy()}
    codes = [model.OperatorCodes(i).BuiltinCode() for i in range(model.OperatorCodesLength())]
    softmaxes = [o for o in operators if codes[o.OpcodeIndex()] == schema.BuiltinOperator.SOFTMAX]
    waiting = [int(operator.Inputs(0)) for operator in softmaxes]
    scores: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor not in scores and (_lows(model, tensor) < LOW_SCORE).any():
            scores.add(tensor)
            waiting += [int(i) for i in producers[tensor].InputsAsNumpy() if i >= 0] if tensor in producers else []
    return scores


def _lows(model: Any, index: int) -> NDArray[np.float32]:
    """Return a view of an activation's recorded minimum or of a float constant's values; else no values."""
    tensor = model.Subgraphs(0).Tensors(index)
    quantization, buffer = tensor.Quantization(), model.Buffers(tensor.Buffer())
    lows = np.zeros(0, np.float32)
    if quantization is not None and quantization.MinLength() == 1:
        lows = quantization.MinAsNumpy()
    elif tensor.Type() == schema.TensorType.FLOAT32 and buffer.DataLength():
        lows = buffer.DataAsNumpy().view(np.float32)
    return lows


def _calibration_wrapper() -> Any:
    try:
        from ai_edge_litert._pywrap_tensorflow_lite_calibration_wrapper import CalibrationWrapper
    except ImportError as error:
        raise BuildFailed(
            f"this ai-edge-litert has no calibration module ({error}); "
            f"INT8 was tested with {KNOWN_GOOD}: pip install 'ai-edge-litert>=2.1.6,<2.4'"
        ) from error
    return CalibrationWrapper
