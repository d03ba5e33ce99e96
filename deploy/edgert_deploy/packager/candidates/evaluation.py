"""The evaluation: FP32's answers, and all other data for building and judging candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from edgert.bundle.rules import Classify, Ctc, Detect, Preprocess, height_and_width
from edgert.bundle.signal_rules import Sound
from edgert.errors import CalibrationInvalid, ConfigInvalid, EngineFailed, SourceInvalid
from edgert_deploy.packager.accuracy.accuracy_gate import Limits
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.accuracy.detectors import are_in_cells, are_suppressed, confident_boxes, in_shares
from edgert_deploy.packager.accuracy.golden_samples import golden_rows
from edgert_deploy.packager.accuracy.judgement import within_0_and_1
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import Metric, Outputs, Reference, Rows
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.processes.children import cause_text
from edgert_deploy.packager.processes.sandbox import ChildFailed
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.processing import SUPPRESSED
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.samples.signal_samples import features_of
from edgert_deploy.packager.sources.source_model import SourceModel, reference_engine

ScoresRule = TypeVar("ScoresRule", Classify | None, Ctc | None)


@dataclass(frozen=True)
class Evaluation:
    """The data that all candidates share.

    Attributes:
        answers: FP32's answers to the hold-out, in all outputs.
        reference: FP32's answers in the outputs that apps get, and the meaning of these outputs.
        golden: The rows of the hold-out that become golden samples.
        golden_set: The golden samples, each in the form of the first item of a session.
    """

    source: SourceModel
    calibration: CalibrationSet
    answers: Outputs
    reference: Reference
    metric: Metric
    limits: Limits
    golden: Rows
    golden_set: CalibrationSet

    def golden_inputs(self, count: int | None = None) -> Outputs:
        """Return the first `count` golden samples, or all without `count`, as one array for each input."""
        return [self.golden_set.inputs[spec.name][:count] for spec in self.source.inputs]

    def golden_answers(self, artifact: Artifact, answers: Outputs) -> Outputs:
        """Return the artifact's answers to the golden samples. `answers` are its answers to the hold-out."""
        inputs, holdout = self.golden_set.inputs, self.reference.holdout.inputs
        if all(np.array_equal(array, holdout[name][self.golden]) for name, array in inputs.items()):
            return [array[self.golden] for array in answers]
        return artifact_outputs(artifact, self.source, self.golden_set)

    def app_answers(self, answers: Outputs) -> Outputs:
        return [array for spec, array in zip(self.source.outputs, answers, strict=True) if spec in self.reference.specs]


def evaluate_source(request: BuildRequest) -> Evaluation:
    """Run the source on the hold-out. Raises SourceInvalid, CalibrationInvalid or ConfigInvalid."""
    source, holdout = request.source, request.holdout
    _check_buckets(request)
    answers = _answers(source, holdout)
    _check_are_numbers(source, answers)
    _check_rows_are_independent(source, holdout, answers)
    _check_boxes(request.detect, source, answers)
    after = request.classify or request.detect
    reference = Reference(
        source.app_outputs,
        [array for spec, array in zip(source.outputs, answers, strict=True) if spec in source.app_outputs],
        holdout,
        class_names=() if after is None else after.labels,
        classify=_softmax_once(request.classify, source, answers),
        detect=request.detect,
        ctc=_softmax_once(request.ctc, source, answers),
        embed=request.embed,
        image_size=_image_size(request),
    )
    metric = metric_for(request.metric, reference.as_embeddings())
    golden = _golden_rows_of(reference.answers, holdout)
    return Evaluation(
        source,
        request.calibration,
        answers,
        reference,
        metric,
        request.limits,
        golden,
        _as_first_items(request, golden),
    )


def _softmax_once(rule: ScoresRule, source: SourceModel, answers: Outputs) -> ScoresRule:
    """Return the rule without softmax if FP32's scores are probabilities already.

    A second softmax would make all scores nearly equal. The integers of a quantized output are not logits, so the rule
    for them has no softmax either.
    """
    if rule is None or not rule.softmax:
        return rule
    scores = next(array for spec, array in zip(source.outputs, answers, strict=True) if spec.name == rule.output)
    return rule if scores.dtype.kind == "f" and not within_0_and_1(scores) else replace(rule, softmax=False)


def _answers(source: SourceModel, samples: CalibrationSet) -> Outputs:
    """Return FP32's answers. Raises CalibrationInvalid if the engine fails."""
    try:
        return reference_outputs(source, samples)
    except (EngineFailed, ChildFailed) as error:
        why = error.message if isinstance(error, EngineFailed) else f"{reference_engine(source)} {cause_text(error)}"
        advice = "Check that the samples' values are valid for the model, such as token numbers below the size of its vocabulary"
        if isinstance(error, ChildFailed) and error.cause == "memory":
            advice = f"Free some memory. {advice}"
        raise CalibrationInvalid(f"the model cannot answer the hold-out samples: {why}. {advice}") from error


def _as_first_items(request: BuildRequest, rows: Rows) -> CalibrationSet:
    """Return golden samples as the first items of sessions: state and the start of a signal are zero."""
    holdout, rule = request.holdout, request.preprocess
    samples = holdout.rows(rows)
    inputs = {name: array.copy() for name, array in samples.inputs.items()}
    for binding in holdout.state:
        inputs[binding.input][:] = 0
    raw = None if holdout.raw is None else holdout.raw[rows]
    if raw is not None and isinstance(rule, Sound) and rule.lead:
        raw = raw.copy()
        raw[:, : rule.lead] = 0
        inputs[rule.input] = features_of(Path("hold-out"), request.source.app_inputs, rule, raw)
    return replace(samples, inputs=inputs, raw=raw)


def _golden_rows_of(answers: Outputs, holdout: CalibrationSet) -> Rows:
    """Return the hold-out's rows that become golden samples, at least one of each bucket."""
    raw = [] if holdout.raw is None else [holdout.raw]
    rows = golden_rows(answers, sum(array[:1].nbytes for array in (*holdout.inputs.values(), *raw)))
    if holdout.buckets is None:
        return rows
    sizes = holdout.sizes
    more = [int(np.flatnonzero(sizes == size)[0]) for size in holdout.buckets.sizes if size not in sizes[rows]]
    return np.array(sorted({*rows.tolist(), *more}), np.intp)


def _check_buckets(request: BuildRequest) -> None:
    """Raise CalibrationInvalid if a bucket has no calibration sample or no hold-out sample."""
    buckets = request.source.buckets
    if buckets is None:
        return
    for kind, samples in (("calibration", request.calibration), ("hold-out", request.holdout)):
        least = 1
        for size in buckets.sizes:
            if not (samples.sizes == size).any():
                raise CalibrationInvalid(
                    f"no {kind} sample is for bucket {size}, which holds lengths of {least} to {size} along {buckets.axis!r}. "
                    "Add samples of these lengths, or omit this bucket"
                )
            least = size + 1


def _image_size(request: BuildRequest) -> tuple[int, int] | None:
    before = request.preprocess if isinstance(request.preprocess, Preprocess) else None
    name = before.input if before is not None else request.source.inputs[0].name
    shape = next(spec.shape for spec in request.source.inputs if spec.name == name)
    if request.detect is None or len(shape) != 4:
        return None
    return height_and_width(shape, "" if before is None else before.model_layout)


def _check_are_numbers(source: SourceModel, answers: Outputs) -> None:
    """Raise CalibrationInvalid for NaN or infinity, because such answers cannot be compared."""
    for spec, array in zip(source.outputs, answers, strict=True):
        if array.dtype.kind != "f":
            continue
        bad = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
        if len(bad):
            what = "NaN" if np.isnan(array[bad[0]]).any() else "infinity"
            raise CalibrationInvalid(
                f"the model answers {what} in output {spec.name!r} to hold-out sample {bad[0]} ({len(bad)} of {len(array)} "
                "samples): remove these samples if the model need not answer them, or correct the model"
            )


def _check_boxes(rule: Detect | None, source: SourceModel, answers: Outputs) -> None:
    """Raise ConfigInvalid if the rule reads other values as pixels, or boxes after suppression."""
    if rule is None:
        return
    boxes = next(array for spec, array in zip(source.outputs, answers, strict=True) if spec.name == rule.boxes)
    rows = boxes if rule.form == "channels_first" else boxes.transpose(0, 2, 1)
    if not rule.scores and rule.form == "anchors_first" and are_suppressed(rows):
        raise ConfigInvalid(
            f"output {rule.boxes!r} {list(boxes.shape[1:])} holds boxes after suppression, as of YOLOv10, YOLO26 and "
            f"RT-DETR: a box, a score and a class. {SUPPRESSED}"
        )
    if not rule.scores and are_in_cells(rule, confident_boxes(rule, boxes)):
        raise ConfigInvalid(
            f"the boxes in output {rule.boxes!r} are not decoded: they are relative to the cells of a grid, as in YOLOX's "
            "default export. Export YOLOX with --decode_in_inference, or omit --postprocess, and let your app decode the "
            "output"
        )
    if not rule.normalized and in_shares(rows[:, :4]):
        raise ConfigInvalid(
            f"the boxes in output {rule.boxes!r} are 0 to 1: shares of the image, not pixels. Give --postprocess a file with "
            f'the table [detect] and normalized = true (form = "{rule.form}"; objectness = true only if a value between '
            "the box and the scores multiplies the scores)"
        )


def _batch_name(source: SourceModel) -> str:
    dims = source.proto.graph.input[0].type.tensor_type.shape.dim if source.proto is not None else ()
    return (dims[0].dim_param if dims else "") or "NAME"


def _check_rows_are_independent(source: SourceModel, holdout: CalibrationSet, answers: Outputs) -> None:
    """Raise SourceInvalid if the answer to a sample depends on its batch. A batch serves several clients."""
    if source.inputs[0].shape[0] != -1:
        return
    for i in (0, len(holdout) - 1):
        single = holdout.rows(slice(i, i + 1))
        for spec, want, got in zip(source.outputs, answers, _answers(source, single), strict=True):
            if not np.allclose(want[i], got[0], rtol=1e-2, atol=1e-2 * (float(want.max()) - float(want.min()) or 1.0)):
                raise SourceInvalid(
                    f"output {spec.name!r} of a sample depends on the other samples in its batch; "
                    "export the model in inference mode, or fix its batch to 1: python -m "
                    f"onnxruntime.tools.make_dynamic_shape_fixed --dim_param {_batch_name(source)} --dim_value 1 MODEL FIXED"
                )
