"""TFLite models: opens a file that has built-in operators only, and runs the model once on zeros.

`examine` runs in a child process (probe.py): the interpreter is native code that trusts its file.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from edgert.errors import SourceInvalid
from edgert.tensors import DATATYPES, MAX_RANK, TensorSpec
from edgert.typed_json import to_json
from edgert_deploy.packager.processes.sandbox import Answer, Progress
from edgert_deploy.packager.sources.tensor_specs import (
    OneSampleOnly,
    check_batch_axes,
    check_run_size,
    check_value,
    output_spec,
)

CUSTOM_OPERATOR = re.compile(r"unresolved custom op: ([\w.-]*\w)")
FLEX = "Select TensorFlow op(s)"
IDENTIFIER = b"TFL3"  # at byte 4 of the file


def is_tflite(data: bytes) -> bool:
    return data[4:8] == IDENTIFIER


def examine(request: dict[str, Any], data: bytes, progress: Progress) -> Answer:
    """Return the model's contract, and the changed model (empty if unchanged). Raises SourceInvalid."""
    name = str(request["name"])
    progress("ai-edge-litert loaded the model and ran it on one sample")
    try:
        return _examined(name, data), b""
    except OneSampleOnly as error:
        data = _with_batch_of_one(data)
        remark = (
            "the model leaves its batch open but answers only one sample at a time, so its batch is fixed to 1: "
            f"{error.message.partition(';')[0]}"
        )
        return {**_examined(name, data), "remarks": [remark]}, data


def _examined(name: str, data: bytes) -> dict[str, Any]:
    interpreter = _interpreter(name, data)
    _check_stateless(name, data)
    inputs = tuple(_input_spec(detail) for detail in interpreter.get_input_details())
    if not inputs or not interpreter.get_output_details():
        raise SourceInvalid(
            f"{name} has no input or no output; convert it again with the tensors that you want as outputs"
        )
    check_batch_axes(inputs)
    runs = [_run(interpreter, inputs, count) for count in ((1, 2) if inputs[0].shape[0] == -1 else (1,))]
    names = [str(detail["name"]) for detail in interpreter.get_output_details()]
    if len({*names, *(spec.name for spec in inputs)}) != len(names) + len(inputs):
        raise SourceInvalid(
            f"{name} has two inputs or outputs with the same name; convert it again with a name for each"
        )
    outputs = [
        output_spec(output, runs[0][i].dtype.name, [run[i].shape for run in runs], inputs)
        for i, output in enumerate(names)
    ]
    answer = {"inputs": inputs, "outputs": outputs, "quantized": _is_quantized(interpreter)}
    result: dict[str, Any] = to_json({**answer, "scales": _scales_of_inputs(interpreter)})
    return result


def _scales_of_inputs(interpreter: Any) -> dict[str, tuple[float, int]]:
    """Return the scale and the zero point of each quantized INT8 input.

    A number in such an input stands for the value (number - zero point) * scale.
    """
    details = (detail for detail in interpreter.get_input_details() if detail["dtype"] == np.int8)
    pairs = {str(detail["name"]): detail["quantization"] for detail in details}
    return {name: (float(scale), int(zero)) for name, (scale, zero) in pairs.items() if scale}


def _with_batch_of_one(data: bytes) -> bytes:
    """Return the file with its open axes fixed to the lengths that the file states for one sample."""
    from ai_edge_litert.schema_py_generated import Model

    changed = bytearray(data)
    model = Model.GetRootAs(changed)
    for graph in (model.Subgraphs(i) for i in range(model.SubgraphsLength())):
        for tensor in (graph.Tensors(i) for i in range(graph.TensorsLength())):
            if tensor.ShapeSignatureLength():
                tensor.ShapeSignatureAsNumpy()[:] = tensor.ShapeAsNumpy()
    return bytes(changed)


def _interpreter(name: str, data: bytes) -> Any:
    from ai_edge_litert.interpreter import Interpreter

    try:
        return Interpreter(model_content=data, num_threads=1)
    except MemoryError:
        raise
    except Exception as error:  # the interpreter raises ValueError and RuntimeError
        raise SourceInvalid(
            f"TFLite's interpreter refuses {name}: {_first_line(error)}; convert it again with a recent TensorFlow, "
            "with TFLite's built-in operators only"
        ) from error


def _check_stateless(name: str, data: bytes) -> None:
    """Raise SourceInvalid for a model that keeps values between runs, because clients would share them."""
    from ai_edge_litert.schema_py_generated import BuiltinOperator, Model

    model = Model.GetRootAs(data)
    codes = (model.OperatorCodes(i).BuiltinCode() for i in range(model.OperatorCodesLength()))
    graphs = [model.Subgraphs(i) for i in range(model.SubgraphsLength())]
    variables = (graph.Tensors(i).IsVariable() for graph in graphs for i in range(graph.TensorsLength()))
    if BuiltinOperator.ASSIGN_VARIABLE in codes or any(variables):
        raise SourceInvalid(
            f"{name} keeps a state inside itself (variables), so its answer depends on the earlier requests of all "
            "clients. Convert the model with the state as an input and an output: sessions then keep it (docs/streams.md). "
            "If each request is a whole sequence, as for an LSTM of Keras, give the Keras or ONNX model instead"
        )


def _input_spec(detail: dict[str, Any]) -> TensorSpec:
    name, shape = str(detail["name"]), [int(n) for n in detail["shape_signature"]]
    dtype = np.dtype(detail["dtype"]).name
    check_value(name, dtype)
    if not 1 <= len(shape) <= MAX_RANK:
        raise SourceInvalid(
            f"input {name!r} has {len(shape)} axes; an input has 1 to {MAX_RANK}, the first of which is the batch"
        )
    if shape[0] not in (-1, 1) or any(n < 1 for n in shape[1:]):
        raise SourceInvalid(
            f"input {name!r} has shape {shape}; axis 0, the batch, must be open (-1) or 1, and all others fixed: "
            "convert the model again with such an input"
        )
    return TensorSpec(name, DATATYPES[dtype], tuple(shape))


def run_on_zeros(interpreter: Any) -> None:
    """Run a TFLite interpreter once, with zeros in the shapes that its inputs have now."""
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], np.zeros(detail["shape"], detail["dtype"]))
    interpreter.invoke()


def _run(interpreter: Any, inputs: tuple[TensorSpec, ...], count: int) -> list[Any]:
    try:
        for spec, detail in zip(inputs, interpreter.get_input_details(), strict=True):
            shape = [count if n == -1 else n for n in spec.shape]
            check_run_size(spec, shape)
            if -1 in spec.shape:
                interpreter.resize_tensor_input(detail["index"], shape)
        run_on_zeros(interpreter)
        return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]
    except (SourceInvalid, MemoryError):
        raise
    except Exception as error:  # the interpreter raises ValueError and RuntimeError
        if FLEX in str(error):
            raise SourceInvalid(
                "the model has operators of TensorFlow (SELECT_TF_OPS), which TFLite's runtime for Python does not have: convert "
                "the model again with TFLite's built-in operators only, or give it as ONNX or Keras"
            ) from error
        if custom := CUSTOM_OPERATOR.search(str(error)):
            raise SourceInvalid(
                f"the model has the custom operator {custom[1]}, which TFLite's runtime for Python does not have: convert the "
                "model again with TFLite's built-in operators only, or give it as ONNX or Keras"
            ) from error
        kind = OneSampleOnly if count > 1 else SourceInvalid
        raise kind(f"the model does not run on a batch of {count}: {_first_line(error)}; convert it again") from error


def _is_quantized(interpreter: Any) -> bool:
    """Whether a tensor has 8 bits and a scale, which means that the converter quantized the model."""
    return any(
        detail["dtype"] in (np.int8, np.uint8) and len(detail["quantization_parameters"]["scales"])
        for detail in interpreter.get_tensor_details()
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
