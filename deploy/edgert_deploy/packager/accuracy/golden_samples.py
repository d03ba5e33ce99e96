"""Golden samples: inputs that ship with a bundle, the answers they must get, and how far a device may differ.

**Which.** SAMPLES of the hold-out, chosen by FP32's answers so that they cover them: first the samples that hold the
lowest and the highest value of each output, then always the one that is farthest from all chosen before (greedy
k-centre; Gonzalez, 1985), of a class that none of them has, while there is one. An error at one end of the range, or
in one class, then shows in a check of eight samples.

**How far.** The artifact answers them here in every way that its engine can compute them: one thread and several,
optimised kernels and plain ones, integer arithmetic and simulated (the builder's `ways`). A device differs from this host as these
differ among themselves, in the order of sums and in rounding; so it may differ by MARGIN times the largest of these
differences, and at least by FLOOR, since kernels that are alike here say little of another processor's: 3
quantisation steps in INT8 (a step: the range of FP32's answers / 255; TFLite's runtimes were seen up to 3 apart), 4
roundings of FP16 or a ten-thousandth of the range in FP32. TensorRT, whose kernels this host cannot run, gets twice as
much, and 2 % of the range at least (it may use TF32).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines import EngineOptions, engine_by_name
from edgert.errors import EngineFailed
from edgert_deploy.packager.accuracy.accuracy_gate import local_artifact
from edgert_deploy.packager.accuracy.reference import Outputs, Rows
from edgert_deploy.packager.builders import Artifact, builder_for
from edgert_deploy.packager.sources.source_model import SourceModel
from edgert_deploy.packager.vendor_output import quiet

SAMPLES = 8
FEATURES_MAX = 256  # of an output's values, evenly spaced, that a sample is placed by
MARGIN = 4.0
STEPS_MIN = 3.0
FLOORS = {
    "int8": STEPS_MIN / 255,
    "int8fp16": STEPS_MIN / 255,
    "fp16": 2.0**-9,
    "fp32": 1e-4,
}  # of the range of FP32's answers
ATOL_MIN = 1e-5


def golden_rows(reference: Outputs, count: int = SAMPLES) -> Rows:
    """The samples to take, in the order of the hold-out; as many as asked for, or all. Deterministic."""
    total = len(reference[0])
    placed = np.concatenate([_places(output) for output in reference], axis=1)
    classes = _classes(reference)
    chosen: list[int] = []
    for output in reference:
        flat = np.nan_to_num(output.reshape(total, -1).astype(np.float64))
        for sample in (flat.min(axis=1).argmin(), flat.max(axis=1).argmax()):
            if int(sample) not in chosen and len(chosen) < count:
                chosen.append(int(sample))
    distance = np.full(total, np.inf)
    for sample in chosen:
        distance = np.minimum(distance, _distances(placed, sample))
    while len(chosen) < min(count, total):
        open_to = np.ones(total, bool)
        open_to[chosen] = False
        unseen = open_to & ~np.isin(classes, classes[chosen])
        allowed = unseen if unseen.any() else open_to
        chosen.append(int(np.where(allowed, distance, -1.0).argmax()))
        distance = np.minimum(distance, _distances(placed, chosen[-1]))
    return np.array(sorted(chosen), np.intp)


def tolerances(
    artifact: Artifact, source: SourceModel, samples: Sequence[NDArray[Any]], golden: Outputs, reference: Outputs
) -> tuple[float, ...]:
    """How far, per output and in its unit, a device's answers to `samples` may lie from `golden`.

    `reference` are FP32's answers to the whole hold-out.
    """
    seen = [0.0] * len(golden)
    for threads, extra in builder_for(artifact.judged_by).ways:
        try:
            answers = _answers(artifact, source, samples, threads or len(os.sched_getaffinity(0)), extra)
        except EngineFailed:  # a way that this version does not know, or not for this model
            continue
        seen = [max(worst, _difference(a, b)) for worst, a, b in zip(seen, answers, golden, strict=True)]
    return tuple(
        _tolerance(artifact, worst, want, got) for worst, want, got in zip(seen, reference, golden, strict=True)
    )


def _tolerance(artifact: Artifact, seen: float, reference: NDArray[Any], golden: NDArray[Any]) -> float:
    span = max(_span(reference), _span(golden))
    builder = builder_for(artifact.engine)
    atol = max(MARGIN * seen, FLOORS[artifact.precision] * span)
    atol = max(builder.tolerance_times * atol, builder.tolerance_floor * span)
    return _rounded_up(max(atol, ATOL_MIN))


def _rounded_up(value: float) -> float:
    """To two digits, so that the last bits of a difference do not make another bundle."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.2g}")


def _answers(
    artifact: Artifact, source: SourceModel, samples: Sequence[NDArray[Any]], threads: int, extra: dict[str, Any]
) -> Outputs:
    """One sample at a time, as a device's check asks."""
    local = local_artifact(artifact, source)
    with quiet():  # TFLite says which delegate it made
        session = engine_by_name(local.engine).load(local, EngineOptions(threads=threads, extra=extra))
    try:
        runs = [session.run([array[i : i + 1] for array in samples]) for i in range(len(samples[0]))]
    finally:
        session.close()
    return [np.concatenate(parts) for parts in zip(*runs, strict=True)]


def _places(output: NDArray[Any]) -> NDArray[np.float64]:
    """Where each sample lies: some of its values, over the range of the output."""
    flat = np.nan_to_num(output.reshape(len(output), -1).astype(np.float64))
    if flat.shape[1] > FEATURES_MAX:
        flat = flat[:, np.linspace(0, flat.shape[1] - 1, FEATURES_MAX).astype(int)]
    # An output of many values must not outweigh one of few.
    return np.asarray(flat / ((np.ptp(flat) or 1.0) * np.sqrt(flat.shape[1])))


def _classes(reference: Outputs) -> NDArray[Any]:
    """The class that FP32 puts first, by the first output that could hold scores; one for all where none could."""
    for output in reference:
        if output.ndim == 2 and output.shape[1] > 1 and output.dtype.kind == "f":
            return np.asarray(np.nan_to_num(output).argmax(axis=1))
    return np.zeros(len(reference[0]), np.intp)


def _distances(placed: NDArray[np.float64], sample: int) -> NDArray[np.float64]:
    return np.asarray(np.linalg.norm(placed - placed[sample], axis=1))


def _difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(np.nan_to_num(difference).max(initial=0.0))


def _span(array: NDArray[Any]) -> float:
    return float(array.max()) - float(array.min()) if array.size else 0.0
