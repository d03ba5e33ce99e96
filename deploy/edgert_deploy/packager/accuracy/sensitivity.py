"""Sensitivity: how much it harms the model's answers if one layer alone is in INT8.

First, the activation ranges are recorded on up to SAMPLES_MAX calibration samples. Then one layer after another is
quantized alone in a Q/DQ graph, and the model runs on the same samples in ONNX Runtime. The noise in the model's
outputs measures the harm of the layer, as SQNR in decibels. A lower SQNR means more harm. This module uses no hold-out
sample, because the samples of the gate must not influence a choice.

docs/decisions/0007 explains why one layer is quantized at a time, and not all layers except one. Source: Wu et al.,
"Integer Quantization for Deep Learning Inference", 2020, section 5 (partial quantization by one-layer sensitivity).
SQNR replaces accuracy as in Nagel et al., "A White Paper on Neural Network Quantization", 2021, section 4.4.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines.onnxruntime import compute_int8_exactly, sdk
from edgert.errors import BuildFailed
from edgert.printable import in_short
from edgert_deploy.packager.accuracy.metrics import SQNR_DB_MAX, sqnr_db
from edgert_deploy.packager.accuracy.reference import Outputs
from edgert_deploy.packager.builders.layers import Layer, layers_of
from edgert_deploy.packager.builders.qdq import Recipe, calibration_reader, write_proto
from edgert_deploy.packager.processes.vendor_output import quiet
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of

SAMPLES_MAX, SAMPLES_MIN = 32, 8
# The limit for the number of layers times the number of samples, so a model with many layers runs on fewer samples.
RUNS_MAX = 2000


@dataclass(frozen=True)
class Harm:
    """The signal to noise ratio (dB) of the outputs if only `layer` is in INT8. SQNR_DB_MAX means no harm."""

    layer: Layer
    sqnr_db: float


def worst_first(harms: Sequence[Harm]) -> tuple[Layer, ...]:
    """Return the harmful layers, the most harmful first, and equally harmful layers in graph order."""
    return tuple(harm.layer for harm in sorted(harms, key=lambda h: h.sqnr_db) if harm.sqnr_db < SQNR_DB_MAX)


class Sensitivity:
    """Measures one layer of a prepared model at a time. Raises BuildFailed if ONNX Runtime's tools fail."""

    def __init__(self, proto: Any, calibration: CalibrationSet, recipe: Recipe) -> None:
        self._proto = proto
        self._recipe = recipe
        count = min(max(RUNS_MAX // len(layers_of(proto)), SAMPLES_MIN), SAMPLES_MAX, len(calibration))
        rows = np.unique(np.linspace(0, len(calibration) - 1, count).astype(int))
        self._samples = {name: array[rows] for name, array in calibration.inputs.items()}
        self._run_max = calibration.run_max
        self._batches = all(_axis_is_open(value) for value in proto.graph.input if value.name in self._samples)
        self._op_types = {node.name: node.op_type for node in proto.graph.node}
        self._ranges: Any = None
        self._reference: Outputs = []

    def of(self, layer: Layer) -> Harm:
        try:
            if not {self._op_types[name] for name in layer.nodes} & set(self._ops()):
                return Harm(layer, SQNR_DB_MAX)  # the recipe leaves this layer in float
            with quiet():
                if self._ranges is None:
                    self._reference = self._run(self._proto)
                    self._ranges = self._recorded()
                return Harm(layer, sqnr_db(self._reference, self._run(self._with_one_quantized(layer))))
        except Exception as error:  # the tools raise errors of any class
            raise BuildFailed(
                f"the harm of quantizing {layer.op} {layer.name!r} cannot be measured: {in_short(error)}; "
                "build this target with --precision fp16 or fp32"
            ) from error

    def _recorded(self) -> Any:
        """Record the lowest and highest value of each activation."""
        from onnxruntime.quantization import CalibrationMethod
        from onnxruntime.quantization.calibrate import create_calibrator

        with tempfile.TemporaryDirectory(prefix="edgert-ranges-") as folder:
            write_proto(self._proto, Path(folder) / "model.onnx")
            calibrator = create_calibrator(
                Path(folder) / "model.onnx",
                list(self._ops()),
                augmented_model_path=str(Path(folder) / "augmented.onnx"),
                calibrate_method=CalibrationMethod.MinMax,
            )
            calibrator.collect_data(calibration_reader(self._feeds()))
            ranges = calibrator.compute_data()
            del calibrator
        return ranges

    def _with_one_quantized(self, layer: Layer) -> Any:
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

        types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
        quantizer = QDQQuantizer(
            copy_of(self._proto),
            True,  # weights per channel
            False,  # use the whole range of weights
            types["int8"],
            types[self._recipe.activations],
            self._ranges,
            list(layer.nodes),
            [],
            list(self._ops()),
            dict(self._recipe.options),
        )
        quantizer.quantize_model()
        return quantizer.model.model

    def _ops(self) -> Sequence[str]:
        from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

        return self._recipe.ops or sorted({*QDQRegistry, *QLinearOpsRegistry})

    def _run(self, proto: Any) -> Outputs:
        options = sdk().SessionOptions()
        options.log_severity_level = 4
        compute_int8_exactly(options)
        # There are many sessions, and each runs only a few times. Threads that spin would use most of the time.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = sdk().InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        runs = [session.run(None, feed) for feed in self._feeds()]
        return [np.concatenate(parts) for parts in zip(*runs, strict=True)]

    def _feeds(self) -> Iterator[dict[str, NDArray[Any]]]:
        count = len(next(iter(self._samples.values())))
        step = self._run_max if self._batches else 1
        for i in range(0, count, step):
            yield {name: array[i : i + step] for name, array in self._samples.items()}


def _axis_is_open(value: Any) -> bool:
    dims = value.type.tensor_type.shape.dim
    return bool(dims) and not dims[0].HasField("dim_value")
