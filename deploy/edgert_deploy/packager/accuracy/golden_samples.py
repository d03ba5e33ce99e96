"""Golden samples: inputs in a bundle, the artifacts' answers to them, and the tolerances of a device.

**The choice.** The golden samples are SAMPLES samples of the hold-out that cover FP32's answers. The first samples are
those with the lowest and the highest value of each output. Each next sample is the one that is farthest from all chosen
samples (greedy k-centre; Gonzalez, 1985). While a class has no chosen sample, the next sample must be of such a class.
So a check of eight samples shows an error at one end of the range, or in one class. If one sample takes megabytes, the
bundle has fewer golden samples, because it holds their inputs and each artifact's answers to them.

**The tolerance.** The artifact answers the samples on this host in every variant of its engine (the builder's `ways`):
with one thread or several, with optimized or plain kernels, with real or simulated INT8. The variants differ in the
order of sums and in rounding, and a device differs from this host in the same respects. So the tolerance is MARGIN
times the largest difference between two variants. It is at least the floor of the precision, because identical results
on this host do not predict the results of another processor. The floor is 3 quantization steps in INT8, 4 roundings in
FP16, or a ten-thousandth of the range in FP32. A step is the range of FP32's answers / 255. The answers of different
TFLite runtimes differed by up to 3 steps. If this host cannot run the kernels of an engine, its builder states larger
floors (`tolerance_times` and `tolerance_floor`).
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import BuildFailed, EngineFailed
from edgert.printable import counted
from edgert_deploy.packager.accuracy.artifact_runs import local_artifact, run_artifact
from edgert_deploy.packager.accuracy.reference import Outputs, Rows
from edgert_deploy.packager.builders import Artifact, builder_for
from edgert_deploy.packager.processes.children import cause_text
from edgert_deploy.packager.processes.sandbox import ChildFailed
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel

SAMPLES = 8
SAMPLES_MIN = 2
# The limit for the inputs and one artifact's answers together. SAMPLES_MIN samples are kept even if they exceed it.
BYTES_MAX = 64 * 1024**2
FEATURES_MAX = 256  # the position of a sample has at most this number of values, evenly spaced, of each output
MARGIN = 4.0
STEPS_MIN = 3.0
# The smallest tolerance of each precision, as a share of the range of FP32's answers.
FLOORS = {"int8": STEPS_MIN / 255, "int8fp16": STEPS_MIN / 255, "fp16": 2.0**-9, "fp32": 1e-4}
ATOL_MIN = 1e-5


def golden_rows(reference: Outputs, input_bytes: int = 0) -> Rows:
    """Return the rows of the hold-out that become golden samples, in the order of the hold-out.

    The same answers give the same rows. There are SAMPLES rows, or fewer if the hold-out has fewer samples or if one
    sample, whose inputs have `input_bytes`, is large.
    """
    total = len(reference[0])
    item_bytes = input_bytes + sum(output[:1].nbytes for output in reference)
    count = min(total, SAMPLES, max(SAMPLES_MIN, BYTES_MAX // max(1, item_bytes)))
    positions = np.concatenate([_positions(output) for output in reference], axis=1)
    classes = _classes(reference)
    chosen: list[int] = []
    for output in reference:
        flat = np.nan_to_num(output.reshape(total, -1).astype(np.float64))
        for sample in (flat.min(axis=1).argmin(), flat.max(axis=1).argmax()):
            if int(sample) not in chosen and len(chosen) < count:
                chosen.append(int(sample))
    distance = np.full(total, np.inf)
    for sample in chosen:
        distance = np.minimum(distance, _distances(positions, sample))
    while len(chosen) < count:
        free = np.ones(total, bool)
        free[chosen] = False
        unseen = free & ~np.isin(classes, classes[chosen])
        allowed = unseen if unseen.any() else free
        chosen.append(int(np.where(allowed, distance, -1.0).argmax()))
        distance = np.minimum(distance, _distances(positions, chosen[-1]))
    return np.array(sorted(chosen), np.intp)


def tolerances(
    artifact: Artifact, source: SourceModel, samples: CalibrationSet, golden: Outputs, reference: Outputs
) -> tuple[float, ...]:
    """Return the tolerance of each output, in the unit of the output.

    Args:
        samples: The golden samples.
        golden: The artifact's answers to the golden samples.
        reference: FP32's answers to the hold-out.
    """
    local = local_artifact(artifact, source)
    largest = [0.0] * len(golden)
    for threads, extra in builder_for(artifact.judged_by).ways:
        try:
            threads = threads or len(os.sched_getaffinity(0))
            answers = run_artifact(local, samples, threads, extra, batch=1)  # a device checks single samples
        except EngineFailed:  # this version of the engine cannot compute the model in this way
            continue
        except ChildFailed as error:
            if extra:  # a way that no device uses
                continue
            raise BuildFailed(
                f"{artifact.judged_by} {cause_text(error)} while it answered the golden samples with the "
                f"{artifact.kind.upper()} artifact, on {counted(threads, 'thread')}; this is a fault of the engine: build with "
                f"another --precision, or remove {artifact.engine} from the profile's engines"
            ) from error
        largest = [max(worst, _difference(a, b)) for worst, a, b in zip(largest, answers, golden, strict=True)]
    return tuple(
        _tolerance(artifact, worst, want, got) for worst, want, got in zip(largest, reference, golden, strict=True)
    )


def _tolerance(artifact: Artifact, seen: float, reference: NDArray[Any], golden: NDArray[Any]) -> float:
    span = max(_span(reference), _span(golden))
    builder = builder_for(artifact.engine)
    atol = max(MARGIN * seen, FLOORS[artifact.precision] * span)
    atol = max(builder.tolerance_times * atol, builder.tolerance_floor * span)
    return _rounded_up(max(atol, ATOL_MIN))


def _rounded_up(value: float) -> float:
    """Round up to two significant digits. The last bits of a difference then do not change the bundle."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.2g}")


def _positions(output: NDArray[Any]) -> NDArray[np.float64]:
    """Return the position of each sample: some values of the output, divided by the range of the output."""
    flat = np.nan_to_num(output.reshape(len(output), -1).astype(np.float64))
    if flat.shape[1] > FEATURES_MAX:
        flat = flat[:, np.linspace(0, flat.shape[1] - 1, FEATURES_MAX).astype(int)]
    # An output with many values must not outweigh an output with few values.
    return np.asarray(flat / ((np.ptp(flat) or 1.0) * np.sqrt(flat.shape[1])))


def _classes(reference: Outputs) -> NDArray[Any]:
    """Return FP32's top class of each sample, from the first output that may hold scores; else zeros."""
    for output in reference:
        if output.ndim == 2 and output.shape[1] > 1 and output.dtype.kind == "f":
            return np.asarray(np.nan_to_num(output).argmax(axis=1))
    return np.zeros(len(reference[0]), np.intp)


def _distances(positions: NDArray[np.float64], sample: int) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(positions - positions[sample], axis=1))


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(np.nan_to_num(difference).max(initial=0.0))


def _span(array: NDArray[Any]) -> float:
    return float(array.max()) - float(array.min()) if array.size else 0.0
