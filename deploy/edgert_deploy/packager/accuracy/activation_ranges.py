"""The range of each layer's answer on calibration samples, and the loss from rounding it to 8 bits.

The FP32 model runs in ONNX Runtime with the answer of every layer as an output. `sqnr_db` is the signal to noise ratio
of an answer that is rounded to 256 steps between its lowest and its highest value, as in min-max calibration. If the
ratio is low, a few outliers stretch the range, and few steps are left for the other values. The ratio excludes the
effect of the noise on later layers. The accuracy gate measures this effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines.onnxruntime import sdk
from edgert.errors import BuildFailed
from edgert.printable import in_short
from edgert_deploy.packager.accuracy.metrics import SQNR_DB_MAX, decibels
from edgert_deploy.packager.builders.layers import layers_of
from edgert_deploy.packager.builders.qdq import prepared
from edgert_deploy.packager.processes.vendor_output import quiet
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of
from edgert_deploy.packager.sources.source_model import SourceModel

SAMPLES_MAX = 16
# The quantiles and `sqnr_db` use at most this number of evenly spaced values from each answer to a sample. The lowest
# and the highest value are found among all values.
VALUES_MAX = 4096
LAYERS_MAX = 1000
QUANTILES = (0.001, 0.5, 0.999)
DIGITS = 4  # the significant digits that are kept, because the last bits differ between processors


@dataclass(frozen=True)
class Activation:
    """The range of one layer's answer in the model's units. The quantiles are 0.1 %, 50 % and 99.9 %."""

    layer: str
    op: str
    low: float
    high: float
    quantiles: tuple[float, float, float]
    sqnr_db: float


def activations(source: SourceModel, calibration: CalibrationSet) -> tuple[Activation, ...]:
    """Return the layers' ranges of an ONNX model in graph order. Return none if the model cannot be run."""
    try:
        proto = prepared(source)
        layers = layers_of(proto)[:LAYERS_MAX]
        with quiet():
            answers = _answers(proto, [layer.values[-1] for layer in layers], calibration)
    except BuildFailed:
        return ()
    by_layer = [(layer, answers[layer.values[-1]]) for layer in layers if layer.values[-1] in answers]
    return tuple(values.of(layer.name, layer.op) for layer, values in by_layer if values.count)


class _Values:
    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf
        self.count = 0
        self._values: list[NDArray[np.float64]] = []

    def add(self, array: NDArray[Any]) -> None:
        flat = array.reshape(-1)
        flat = flat[np.isfinite(flat)]
        if not flat.size:
            return
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        self.count += flat.size
        self._values.append(flat[:: -(-flat.size // VALUES_MAX)].astype(np.float64))

    def of(self, layer: str, op: str) -> Activation:
        values = np.concatenate(self._values)
        low, median, high = (_rounded(v) for v in np.quantile(values, QUANTILES))
        return Activation(
            layer, op, _rounded(self.low), _rounded(self.high), (low, median, high), self._sqnr_db(values)
        )

    def _sqnr_db(self, values: NDArray[np.float64]) -> float:
        # Every engine represents zero exactly, so zero is one of the steps.
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        step = (high - low) / 255
        if step == 0:
            return SQNR_DB_MAX
        noise = float(np.square(values - np.round(values / step) * step).sum())
        return round(decibels(float(np.square(values).sum()), noise), 1)


def _answers(proto: Any, names: Sequence[str], calibration: CalibrationSet) -> dict[str, _Values]:
    """Run the graph on samples, and return its values `names`. Raises BuildFailed if ONNX Runtime fails."""
    import onnx

    onnxruntime = sdk()
    wide = copy_of(proto)
    have = {value.name for value in wide.graph.output}
    wide.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # one thread adds in the same order in every run, so the numbers are the same
    options.log_severity_level = 4
    by_name = {name: _Values() for name in names}
    try:
        session = onnxruntime.InferenceSession(wide.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for i in range(min(len(calibration), SAMPLES_MAX)):
            feeds = {name: array[i : i + 1] for name, array in calibration.inputs.items()}
            for name, array in zip(names, session.run(list(names), feeds), strict=True):
                if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                    by_name[name].add(array)
    except Exception as error:  # ONNX Runtime raises errors of any class
        raise BuildFailed(f"cannot read the layers' answers: {in_short(error)}") from error
    return by_name


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
