"""Graphs of a few operators to test the TFLite lowering: a `Case` has a graph, inputs and constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8

Arrays = dict[str, NDArray[Any]]
BATCHES = (1, 3)
# Float32 sums depend on their order; the largest rows add up some hundred products.
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-4, 2e-5
IMAGE = {"x": (4, 7, 9)}
VOLUME = {"x": (4, 5, 6, 7)}
SIGNAL = {"x": (4, 11)}
TOKENS = {"x": (5, 8)}
FEATURES = {"x": (6,)}


def random(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


# The numbers of the batch's items, as exporters of PyTorch write `torch.arange(x.shape[0])`.
ITEM_NUMBERS = "s = Shape<start=0, end=1>(x) l = Squeeze(s) n = Range(zero, l, one)"
NUMBERS: Arrays = {"zero": np.array(0), "one": np.array(1), "last": ints(1), "two": ints(2)}


@dataclass(frozen=True)
class Case:
    """A graph in ONNX's text form: `items` are shapes without the batch, `constants` become initializers."""

    name: str
    body: str
    items: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 17
    types: dict[str, str] = field(default_factory=dict)
    outputs: str = "float y"
    positive: bool = False


def model_of(case: Case, batch: str = "N") -> onnx.ModelProto:
    """Return the case's model with an open batch axis."""
    inputs = ", ".join(
        f"{case.types.get(name, 'float')}[{', '.join([batch, *map(str, item)])}] {name}"
        for name, item in case.items.items()
    )
    text = f'<ir_version: 8, opset_import: ["": {case.opset}]> g ({inputs}) => ({case.outputs}) {{ {case.body} }}'
    model = parser.parse_model(text)
    for name, array in case.constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return model


def inputs_of(case: Case, batch: int, seed: int = 1) -> Arrays:
    def values(name: str, item: tuple[int, ...]) -> NDArray[Any]:
        if case.types.get(name) == "int64":
            return np.random.default_rng(seed).integers(0, 7, (batch, *item))
        array = random(batch, *item, seed=seed + len(name) + ord(name[0]))
        return np.abs(array) + np.float32(0.1) if case.positive else array

    return {name: values(name, item) for name, item in case.items.items()}


def run_onnx(model: onnx.ModelProto, inputs: Arrays) -> list[NDArray[Any]]:
    """Return ONNX Runtime's answer, or the answer of ONNX's reference if this release does not know the opset."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session: Any = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        if "under development" not in str(error):
            raise
        session = ReferenceEvaluator(model)
    outputs: list[NDArray[Any]] = session.run(None, inputs)
    return outputs


def run_tflite(content: bytes, inputs: Arrays) -> list[NDArray[Any]]:
    """Return the outputs in the file's own order."""
    interpreter = Interpreter(model_content=content, num_threads=1)
    indices = {detail["name"]: detail["index"] for detail in interpreter.get_input_details()}
    for name, array in inputs.items():
        interpreter.resize_tensor_input(indices[name], array.shape, strict=True)
    interpreter.allocate_tensors()
    for name, array in inputs.items():
        interpreter.set_tensor(indices[name], array)
    interpreter.invoke()
    return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def assert_agrees_with_onnx_runtime(case: Case) -> None:
    """Lower `case` and compare it at each of BATCHES."""
    model = model_of(case)
    content = lower(model)
    for batch in BATCHES:
        inputs = inputs_of(case, batch)
        (wanted,), (got,) = run_onnx(model, inputs), run_tflite(content, inputs)
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)


def operators_of(cases: Iterable[Case]) -> set[str]:
    return {node.op_type for case in cases for node in model_of(case).graph.node}


def quantized(case: Case, samples: int = 100) -> bytes:
    content = lower(model_of(case), for_int8=True)
    return quantize_int8(content, [list(inputs_of(case, 1, seed).values()) for seed in range(samples)])


def sqnr_db(wanted: NDArray[Any], got: NDArray[Any]) -> float:
    noise = np.square(wanted.astype(np.float64) - got).sum()
    return float(10 * np.log10(np.square(wanted.astype(np.float64)).sum() / max(noise, 1e-30)))
