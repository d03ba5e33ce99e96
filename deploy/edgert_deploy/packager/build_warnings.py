"""The warnings of a build: why a passed gate may prove little, and what targets do not get.

Each helper checks one condition and returns a sentence for each case. No warning stops the build.
"""

from __future__ import annotations

from edgert.printable import counted
from edgert_deploy.common.quantities import size_text
from edgert_deploy.packager.accuracy import accuracy_gate
from edgert_deploy.packager.accuracy.golden_samples import SAMPLES
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.candidates.evaluation import Evaluation
from edgert_deploy.packager.request import BuildRequest, TargetRequest, overlap
from edgert_deploy.packager.samples.samples import constant_inputs, inputs_of_other_size, inputs_out_of_range
from edgert_deploy.packager.sources.onnx_graph.classical import classical_operators, is_float_only


def build_warnings(request: BuildRequest, targets: tuple[TargetRequest, ...], evaluation: Evaluation) -> list[str]:
    """Return the warnings that are known before the first artifact is built.

    `request` has the user's rules. The rules of `evaluation.reference` may differ, because the build omits a softmax
    that the scores do not need.
    """
    return [
        *request.source.remarks,
        *_softmax_warnings(request, evaluation.reference),
        *_classical_warnings(request),
        *_overlap_warnings(request),
        *_constant_warnings(request),
        *_range_warnings(request, targets),
        *accuracy_gate.warnings(evaluation.metric, evaluation.reference, evaluation.limits),
        *_golden_warnings(evaluation),
    ]


def _softmax_warnings(request: BuildRequest, reference: Reference) -> list[str]:
    """Return a sentence for each rule whose softmax the build omits."""
    pairs = ((request.classify, reference.classify), (request.ctc, reference.ctc))
    return [
        f"output {after.output!r} holds no logits, so devices compute no softmax of its scores"
        for before, after in pairs
        if before is not None and after is not None and before.softmax != after.softmax
    ]


def _classical_warnings(request: BuildRequest) -> list[str]:
    if not (operators := classical_operators(request.source.proto)):
        return []
    precision = ", in FP32: there is nothing to quantize" if is_float_only(request.source.proto) else ""
    return [
        f"the model uses {', '.join(operators)} of ai.onnx.ml (scikit-learn, XGBoost, LightGBM): "
        f"of all engines, only onnxruntime computes these operators, so targets get the model for onnxruntime alone{precision}"
    ]


def _golden_warnings(evaluation: Evaluation) -> list[str]:
    count = len(evaluation.golden)
    if count >= min(SAMPLES, len(evaluation.reference.holdout)):
        return []
    each = sum(array[:1].nbytes for array in (*evaluation.golden_inputs(), *evaluation.answers))
    return [
        f"one sample with its answers takes {size_text(each)}, so the bundle has {counted(count, 'golden sample')} instead of {SAMPLES}: "
        "a device's check of its answers proves less"
    ]


def _overlap_warnings(request: BuildRequest) -> list[str]:
    if not request.allow_overlap or not (shared := overlap(request.calibration, request.holdout)):
        return []
    return [
        f"{len(shared)} of {counted(len(request.holdout), 'hold-out sample')} are also calibration samples: the gate proves less "
        "than with separate samples"
    ]


def _constant_warnings(request: BuildRequest) -> list[str]:
    """Return a sentence for each input that has the same values in all samples."""
    texts = []
    for kind, samples in (("calibration", request.calibration), ("hold-out", request.holdout)):
        for name in constant_inputs(samples):
            values = samples.inputs[name][0]
            same = f"is {values.flat[0]} everywhere" if values.size and values.min() == values.max() else "is the same"
            texts.append(
                f"input {name!r} {same} in all {len(samples)} {kind} samples, so for this input they prove no more than one sample: "
                "check the code that makes the samples. Give samples that vary like the data on your devices"
            )
    return texts


def _range_warnings(request: BuildRequest, targets: tuple[TargetRequest, ...]) -> list[str]:
    """Return a sentence for each input whose calibration and hold-out values differ in size or range."""
    apart = inputs_of_other_size(request.calibration, request.holdout)
    beyond = [name for name in inputs_out_of_range(request.calibration, request.holdout) if name not in apart]
    precisions = {precision for target in targets for precision in target.precisions}
    if "int8" not in precisions or request.source.quantized:
        beyond = []  # no scale depends on the calibration samples
    texts = []
    for name in (*apart, *beyond):
        one, other = (
            f"{samples.inputs[name].min():.4g} to {samples.inputs[name].max():.4g}"
            for samples in (request.calibration, request.holdout)
        )
        effect = (
            ", so INT8 has the wrong ranges: prepare both sets in the same way, as the app does"
            if name in apart
            else ". INT8 clips values outside the calibration range. Give calibration samples that cover the range of the "
            "values on your devices"
        )
        texts.append(f"input {name!r} is {one} in the calibration samples and {other} in the hold-out samples{effect}")
    return texts
