"""Runs a float .tflite on samples and records the range of each activation.

The ranges determine the INT8 scales.

TFLite's own calibrator is wrong for some tensors, because it reads the inputs of an operator after the operator has
run. An operator that runs in place (a MUL or an ADD, if no other operator reads its input) has overwritten its input by
then. Example: a sigmoid before a multiplication by 63 got a range of 63. So this module records the ranges itself, with
separate memory for every tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.writer import STEP_MARK


class Ranges:
    """The lowest and highest value of each float tensor of `float_model` so far.

    `cut` is the share of a tensor's values to ignore at either end, in each sample. A few outliers would widen the
    range, and leave few of the 256 steps for all other values.
    """

    def __init__(self, float_model: bytes, cut: float = 0.0) -> None:
        self._cut = cut
        self._interpreter = interpreter_with_all_tensors(float_model)
        activations = _float_activations(schema.Model.GetRootAs(float_model, 0))
        self._lows = dict.fromkeys(activations, np.float32(np.inf))
        self._highs = dict.fromkeys(activations, np.float32(-np.inf))

    def prepare(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Allocate memory for samples of these shapes."""
        for detail, array in zip(self._interpreter.get_input_details(), arrays, strict=True):
            self._interpreter.resize_tensor_input(detail["index"], array.shape)
        self._interpreter.allocate_tensors()

    def watch(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Run the model on a sample, one array of the prepared shape per input, and update the ranges."""
        for detail, array in zip(self._interpreter.get_input_details(), arrays, strict=True):
            self._interpreter.set_tensor(detail["index"], array)
        self._interpreter.invoke()
        for index, low in self._lows.items():
            values = self._interpreter.get_tensor(index)
            if not values.size:
                continue
            lowest, highest = self._ends(values)
            self._lows[index] = np.minimum(low, lowest)  # np.minimum and np.maximum keep a NaN, but min() does not
            self._highs[index] = np.maximum(self._highs[index], highest)

    def write(self, calibrated: bytearray) -> None:
        """Write the ranges into `calibrated`.

        `calibrated` is `float_model` with the fields that TFLite's calibrator adds.

        The tensors of all steps of a sequence share one range. One step has too few values for a range of its own, and
        a clipped value would distort all later steps.
        """
        graph = schema.Model.GetRootAs(calibrated, 0).Subgraphs(0)
        names = {index: graph.Tensors(index).Name().decode() for index in self._lows}
        kinds = {index: re.sub(rf"{STEP_MARK}[0-9]+", "", name) for index, name in names.items()}
        lows: dict[str, np.float32] = {}
        highs: dict[str, np.float32] = {}
        for index, kind in kinds.items():
            lows[kind] = np.minimum(lows.get(kind, np.float32(np.inf)), self._lows[index])
            highs[kind] = np.maximum(highs.get(kind, np.float32(-np.inf)), self._highs[index])
        for index, kind in kinds.items():
            quantization = graph.Tensors(index).Quantization()
            if quantization is not None and quantization.MaxLength() == 1:
                quantization.MinAsNumpy()[0], quantization.MaxAsNumpy()[0] = lows[kind], highs[kind]

    def _ends(self, values: NDArray[np.float32]) -> tuple[Any, Any]:
        count = int(values.size * self._cut)
        if not count or np.isnan(values).any():
            return values.min(), values.max()
        ordered = np.partition(values, (count, values.size - 1 - count), axis=None)
        return ordered[count], ordered[values.size - 1 - count]


def interpreter_with_all_tensors(content: bytes) -> Interpreter:
    """Return an interpreter that keeps the value of every tensor after a run."""
    return Interpreter(
        model_content=content,
        num_threads=1,
        experimental_preserve_all_tensors=True,
        # A delegate does not expose the tensors between its operators.
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )


def _float_activations(model: Any) -> list[int]:
    """Return the float tensors that are inputs of the model or results of its operators."""
    graph = model.Subgraphs(0)
    tensors = map(graph.Tensors, range(graph.TensorsLength()))
    return [
        index
        for index, tensor in enumerate(tensors)
        if tensor.Type() == schema.TensorType.FLOAT32 and not model.Buffers(tensor.Buffer()).DataLength()
    ]
