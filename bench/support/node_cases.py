"""The ONNX project's node tests for the TFLite lowering: which are expected to pass, which are refused, and why.

A test is expected to pass when every operator of its model is in `COVERED` and no rule of `OUTSIDE` applies. All others
are unsupported, each with a reason. The rules look at the model, never at the name of a test.

Many node tests pass as an input what an exported model has as a constant: the shape of a Reshape, the axes of a
reduction, the weights of a convolution. `bound` turns those into constants, as a build needs them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgert_deploy.packager.sources.onnx_graph.opsets import IR_MAX
from edgert_deploy.packager.tflite_lowering.writer import TENSOR_TYPES

Arrays = dict[str, NDArray[Any]]

PROMISED_GROUPS = {
    "Convolution and matrices": "Conv ConvTranspose DFT Einsum Gemm MatMul",
    "Pooling": "AveragePool GlobalAveragePool GlobalMaxPool MaxPool",
    "Arithmetic": "Abs Add Ceil Cos Div Exp Floor Log Max Mean Min Mod Mul Neg Pow Reciprocal Round Sign Sin Sqrt Sub Sum",
    "Comparison and logic": "And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Where Xor",
    "Activation": "Celu Clip Elu Erf Gelu HardSigmoid HardSwish LeakyRelu LogSoftmax Mish PRelu Relu Selu Sigmoid Softmax "
    "Softplus Softsign Swish Tanh ThresholdedRelu",
    "Normalization": "BatchNormalization GroupNormalization InstanceNormalization LRN LayerNormalization LpNormalization "
    "MeanVarianceNormalization RMSNormalization",
    "Reduction": "ArgMax ArgMin CumSum ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
    "ReduceSum ReduceSumSquare TopK",
    "Movement": "Cast CenterCropPad Concat DepthToSpace Dropout Expand Flatten Gather GatherElements GatherND GridSample Identity OneHot Pad Reshape Resize "
    "ReverseSequence ScatterND Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze Upsample",
    "Recurrence": "GRU LSTM RNN",
    "Functions that ONNX composes from other operators": "Attention NegativeLogLikelihoodLoss RotaryEmbedding SoftmaxCrossEntropyLoss "
    "SwiGLU",
    "Constants, computed during the build": "CastLike Constant ConstantOfShape Range Shape Size",
}
COVERED = frozenset(" ".join(PROMISED_GROUPS.values()).split())

# Inputs that a build needs as constants, by operator; exported models have them as constants.
CONSTANT_INPUTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "CenterCropPad": (1,),
    "Conv": (1, 2),
    "ConstantOfShape": (0,),
    "ConvTranspose": (1, 2),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "GRU": (1, 2, 3, 4),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 4),
    "RNN": (1, 2, 3, 4),
    "OneHot": (1, 2),
    "PRelu": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **{name: (1,) for name in COVERED if name.startswith("Reduce")},
}


@dataclass(frozen=True)
class NodeTest:
    """One test of the ONNX project: a model, its inputs by name, and the expected outputs."""

    name: str
    model: onnx.ModelProto
    inputs: Arrays
    outputs: list[Any]
    relative_tolerance: float
    absolute_tolerance: float

    @property
    def operators(self) -> list[str]:
        return sorted({_full_name(node) for node in self.model.graph.node})

    @property
    def dtypes(self) -> set[str]:
        """Return the dtype of each input, output and cast; "sequence" and the like for other values."""
        values = [*self.model.graph.input, *self.model.graph.output]
        casts = [a.i for node in _nodes(self, "Cast") for a in node.attribute if a.name == "to"]
        return {_type_name(value.type) for value in values} | {_element_name(element) for element in casts}

    @property
    def subject(self) -> str:
        """Return the tested operator: the operator of the only node, or all operators of an expanded function."""
        return self.operators[0] if len(self.model.graph.node) == 1 else "expanded function"


@dataclass(frozen=True)
class Outside:
    """A part of a supported operator that TFLite or a build cannot express."""

    reason: str
    applies: Callable[[NodeTest], bool]


HELD_DTYPES = frozenset(str(dtype) for dtype in TENSOR_TYPES)


def _attribute_is(operator: str, attribute: str, *values: Any) -> Callable[[NodeTest], bool]:
    def applies(test: NodeTest) -> bool:
        found = (
            helper.get_attribute_value(a) for n in _nodes(test, operator) for a in n.attribute if a.name == attribute
        )
        return any((value.decode() if isinstance(value, bytes) else value) in values for value in found)

    return applies


def _trains(test: NodeTest) -> bool:
    flags = (test.inputs.get(node.input[2]) for node in _nodes(test, "Dropout") if len(node.input) > 2)
    return any(flag is not None and bool(flag) for flag in flags)


def _has_empty_result(test: NodeTest) -> bool:
    return any(np.size(output) == 0 for output in test.outputs)


def _is_refused_by_onnx_runtime(test: NodeTest) -> bool:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # it never runs
    model, _ = bound(test)
    model.ir_version = min(model.ir_version, IR_MAX)  # a build writes this version
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return True
    return False


def _has_output(operator: str, index: int) -> Callable[[NodeTest], bool]:
    return lambda test: any(len(n.output) > index and n.output[index] for n in _nodes(test, operator))


# The first matching rule gives the reason.
OUTSIDE = (
    Outside("a dtype that the lowering does not support", lambda test: not test.dtypes <= HELD_DTYPES),
    Outside("a softmax in float64", _attribute_is("Attention", "softmax_precision", onnx.TensorProto.DOUBLE)),
    Outside("a result without elements", _has_empty_result),
    Outside("a cubic mode of GridSample", _attribute_is("GridSample", "mode", "cubic", "bicubic")),
    Outside("a reflection of GridSample", _attribute_is("GridSample", "padding_mode", "reflection")),
    Outside("volumes of GridSample", lambda test: bool(_nodes(test, "GridSample")) and test.outputs[0].ndim == 5),
    Outside("a crop by Resize", _attribute_is("Resize", "coordinate_transformation_mode", "tf_crop_and_resize")),
    Outside(
        "an aspect ratio kept by Resize",
        _attribute_is("Resize", "keep_aspect_ratio_policy", "not_larger", "not_smaller"),
    ),
    Outside("a reduction of ScatterND other than add", _attribute_is("ScatterND", "reduction", "mul", "max", "min")),
    Outside(
        "powers of int64",
        lambda test: bool(_nodes(test, "Pow")) and {t.dtype for t in test.inputs.values()} == {np.dtype("int64")},
    ),
    Outside("an operator in training mode", _attribute_is("BatchNormalization", "training_mode", 1)),
    Outside("an operator in training mode", _trains),
    Outside("the mask of Dropout", _has_output("Dropout", 1)),
    Outside("the indices of MaxPool", _has_output("MaxPool", 1)),
    Outside("the peepholes of an LSTM", lambda test: any(len(node.input) > 7 for node in _nodes(test, "LSTM"))),
    Outside("a form that ONNX Runtime does not support", _is_refused_by_onnx_runtime),
    # ONNX Runtime 1.32 has no kernel for it: it writes the operator out, and casts to float64 on the way.
    Outside("ReduceLogSumExp of opset 28", lambda test: _opset(test) >= 28 and bool(_nodes(test, "ReduceLogSumExp"))),
)


def without_lowering(operators: Iterable[str]) -> list[str]:
    return [name for name in operators if name not in COVERED]


def reason_outside(test: NodeTest) -> str | None:
    """Return the reason why `test` is not expected to pass; None if it is expected to pass."""
    if unknown := without_lowering(test.operators):
        return f"no lowering for {', '.join(unknown)}"
    return next((rule.reason for rule in OUTSIDE if rule.applies(test)), None)


def bound(test: NodeTest) -> tuple[onnx.ModelProto, Arrays]:
    """Return the model with the inputs of CONSTANT_INPUTS as constants, and the other inputs."""
    names = _inputs_behind(test.model, _constant_values(test.model)) & test.inputs.keys()
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    kept = [value for value in model.graph.input if value.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(test.inputs[name], name) for name in sorted(names))
    return model, {name: array for name, array in test.inputs.items() if name not in names}


def _constant_values(model: onnx.ModelProto) -> set[str]:
    return {
        node.input[index]
        for node in model.graph.node
        for index in CONSTANT_INPUTS.get(_full_name(node), ())
        if index < len(node.input)
    }


def _inputs_behind(model: onnx.ModelProto, values: set[str]) -> set[str]:
    """Return `values` and every input of their computation; a shape needs no value."""
    behind = set(values)
    for node in reversed(model.graph.node):
        if behind & set(node.output) and node.op_type not in ("Shape", "Size"):
            behind |= set(node.input)
    return behind


def load_tests() -> list[NodeTest]:
    """Make all node tests of the installed onnx in memory; takes some seconds."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests divide by zero on purpose
        return [test for case in load_model_tests(kind="node") for test in _data_sets(case)]


def _data_sets(case: Any) -> Iterator[NodeTest]:
    for inputs, outputs in case.data_sets:
        names = [value.name for value in case.model.graph.input]
        arrays = dict(zip(names, inputs, strict=False))
        test = NodeTest(case.name, case.model, arrays, list(outputs), case.rtol, case.atol)
        # The expected values of an inverse DFT are rounded themselves: 2e-7 where 0 is right.
        yield replace(test, absolute_tolerance=1e-6) if "DFT" in test.operators else test


def _nodes(test: NodeTest, operator: str) -> list[onnx.NodeProto]:
    return [node for node in test.model.graph.node if _full_name(node) == operator]


def _opset(test: NodeTest) -> int:
    return max((one.version for one in test.model.opset_import if one.domain in ("", "ai.onnx")), default=0)


def _full_name(node: onnx.NodeProto) -> str:
    return f"{node.domain}:{node.op_type}" if node.domain else str(node.op_type)


def _type_name(value: onnx.TypeProto) -> str:
    kind = value.WhichOneof("value")
    if kind != "tensor_type":
        return str(kind).removesuffix("_type")
    return _element_name(value.tensor_type.elem_type)


def _element_name(element: int) -> str:
    if element == onnx.TensorProto.STRING:
        return "string"
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(element)))
