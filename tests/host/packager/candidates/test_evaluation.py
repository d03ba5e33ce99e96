"""The evaluation: the source must answer each sample of the hold-out independently of the others."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.rules import Classify, Ctc, Detect
from edgert.bundle.signing import SigningKey
from edgert.errors import CalibrationInvalid, ConfigInvalid, SourceInvalid
from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.candidates.evaluation import Evaluation, evaluate_source
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.models.outputs import yolox
from tests.support.models.texts import samples_of, source_in, text, texts
from tests.support.packs import pack
from tests.support.profiles import profile


def test_a_model_whose_answers_depend_on_the_rest_of_the_batch_is_refused(
    signing_key: SigningKey, tmp_path: Path
) -> None:
    """Only numbers above 1 change the other answers, so the examination of the model does not see it."""
    body = "f = Cast<to=1>(x) m = ReduceMax(f) e = Sub(m, one) r = Relu(e) y = Sub(f, r)"
    proto = models.model("int64[N,4] x) => (float[N,4] y", body, {"one": np.ones(1, np.float32)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": np.random.default_rng(0).integers(0, 90, (16, 4))}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", precision="fp32", allow_overlap=True)
    with pytest.raises(
        SourceInvalid, match=r"depends on the other samples.*make_dynamic_shape_fixed --dim_param N --dim_value 1"
    ):
        pack(request, signing_key, tmp_path / "m.edgert")


def test_samples_that_the_model_does_not_take_are_named_as_the_cause(tmp_path: Path) -> None:
    proto = models.model("int64[N,4] x) => (float[N,4,2] y", "y = Gather(w, x)", {"w": models.random(3, 2)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": np.full((16, 4), 7, np.int64)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True)
    with pytest.raises(
        CalibrationInvalid, match=r"cannot answer the hold-out samples: .*out of data bounds.* token numbers"
    ):
        evaluate_source(request)


def test_a_sample_that_crashes_the_engine_is_named_as_the_cause(tmp_path: Path) -> None:
    source = load_source(models.write(models.dividing(), tmp_path / "m.onnx"))
    holdout = CalibrationSet({"x": models.crashing(models.for_dividing(20))}, None)
    request = BuildRequest(source, holdout, holdout, (profile("one"),), "m", allow_overlap=True)
    with pytest.raises(CalibrationInvalid, match=r"cannot answer the hold-out samples: onnxruntime crashed \(SIGFPE\)"):
        evaluate_source(request)


def test_an_answer_whose_length_depends_on_the_values_is_refused(tmp_path: Path) -> None:
    """An example is a model that reads a table until it finds the table's end."""
    body = (
        "z = Constant <value = float {0.0}> () p = GreaterOrEqual(x, z) i = NonZero(p) t = Transpose(i) "
        "o = Constant <value = int64[1] {0}> () y = Unsqueeze(t, o)"
    )
    source = load_source(models.write(models.model("float[1,4] x) => (int64[1,k,2] y", body), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(16, 4)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True)
    with pytest.raises(SourceInvalid, match=r"output 'y' has shape \[1, 4, 2\] for a sample of zeros and \[1, ., 2\]"):
        evaluate_source(request)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("1,4", r"has shape \[1, 2\] for .* zeros and \[., 2\]"),
        ("N,4", r"has \d+ rows for 16 samples: its length depends on the values"),
    ],
)
def test_an_answer_whose_rows_depend_on_the_values_is_refused(shape: str, message: str, tmp_path: Path) -> None:
    """An example is a model that suppresses boxes itself. A sample of zeros may give one row by chance."""
    body = "n = ReduceMin <axes = [1]> (x)  p = GreaterOrEqual(n, z)  i = NonZero(p)  t = Transpose(i)  y = Identity(t)"
    proto = models.model(f"float[{shape}] x) => (int64[k,2] y", body, {"z": np.asarray(np.float32(0))})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(16, 4)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True)
    with pytest.raises(SourceInvalid, match=message):
        evaluate_source(request)


def evaluated(tmp_path: Path, outputs: str, body: str) -> Evaluation:
    source = load_source(models.write(models.model(f"float[N,4] x) => ({outputs}", body), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": 400 * models.random(40, 4)}, None)
    return evaluate_source(BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True))


def test_answers_that_are_nan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationInvalid, match=r"NaN in output 'y' to hold-out sample 0 \(\d+ of 40 samples\): remove"
    ):
        evaluated(tmp_path, "float[N,4] y", "y = Log(x)")
    with pytest.raises(CalibrationInvalid, match=r"infinity in output 'y' to hold-out sample 0 \(\d+ of 40 samples\)"):
        evaluated(tmp_path, "float[N,4] y", "p = Relu(x) y = Reciprocal(p)")


def test_outputs_of_any_dtype_are_compared(tmp_path: Path) -> None:
    body = "b = Less(x, x) c = Clip(x) i = Cast<to=6>(c) e = Cast<to=3>(i)"
    evaluation = evaluated(tmp_path, "bool[N,4] b, int8[N,4] e", body)
    assert [array.dtype for array in evaluation.answers] == [np.dtype("bool"), np.dtype("int8")]
    assert int(evaluation.answers[1].max()) - int(evaluation.answers[1].min()) > 200  # more than int8 holds


def test_the_reference_has_the_answers_of_the_source_and_golden_samples_come_from_the_holdout(
    build_request: BuildRequest,
) -> None:
    evaluation = evaluate_source(build_request)
    np.testing.assert_array_equal(
        evaluation.reference.answers[0], reference_outputs(build_request.source, build_request.holdout)[0]
    )
    assert (evaluation.metric.name, evaluation.limits) == ("top1", build_request.limits)
    assert evaluation.reference.class_names == tuple("0123456789")
    (images,) = evaluation.golden_inputs()
    np.testing.assert_array_equal(images, build_request.holdout.inputs["image"][evaluation.golden])
    assert len(evaluation.golden_inputs(1)[0]) == 1


@pytest.mark.parametrize(
    ("body", "once"),
    [
        ("s = Softmax(x) y = Identity(s)", True),
        ("y = Sigmoid(x)", True),
        ("y = Neg(x)", False),
        ("y = Cast<to=3>(x)", True),
    ],
)
def test_scores_that_are_probabilities_get_no_softmax(body: str, once: bool, tmp_path: Path) -> None:
    # A second softmax would change 0.99 among ten classes to 0.23. The 8-bit integers of a quantized output are not
    # logits.
    kind = "int8" if "Cast" in body else "float"
    source = load_source(models.write(models.model(f"float[N,4] x) => ({kind}[N,4] y", body), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": 9 * models.random(40, 4)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True, classify=Classify("y"))
    rule = evaluate_source(request).reference.classify
    assert rule == Classify("y", softmax=not once)
    ctc = evaluate_source(replace(request, classify=None, ctc=Ctc("y", ("", "a"), softmax=False))).reference.ctc
    assert ctc == Ctc("y", ("", "a"), softmax=False)


def test_the_size_of_an_image_is_known_without_preprocessing(tmp_path: Path) -> None:
    proto = models.model("float[N,8,16,3] x) => (float[N,6,64] y", "y = Reshape(x, s)", {"s": np.array([-1, 6, 64])})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": 9 * models.random(16, 8, 16, 3)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True, detect=Detect("y"))
    assert evaluate_source(request).reference.image_size == (8, 16)


def test_boxes_that_the_model_suppresses_itself_are_not_taken_for_scores(tmp_path: Path) -> None:
    """Example: YOLO26. Earlier code refused every output [N, K, 6] with K up to 300, such as 252 boxes of YOLOv5."""
    proto = models.model("float[N,3,8,12] x) => (float[N,48,6] y", "y = Reshape(x, s)", {"s": np.array([-1, 48, 6])})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    anchors = np.abs(models.random(16, 48, 6)) / 5
    anchors[..., :4] *= 300
    suppressed = anchors.copy()
    suppressed[..., 2:4] += suppressed[..., :2]
    suppressed[..., 5] = 1
    rule = Detect("y", form="anchors_first", objectness=True)
    for boxes, refused in ((anchors, False), (suppressed, True)):
        samples = CalibrationSet({"x": boxes.reshape(16, 3, 8, 12)}, None)
        request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True, detect=rule)
        with pytest.raises(ConfigInvalid, match="end2end=False") if refused else contextlib.nullcontext():
            evaluate_source(request)


def test_boxes_in_shares_of_the_image_are_not_read_as_pixels(tmp_path: Path) -> None:
    """Example: RT-DETR. Earlier code packed such a rule, and devices answered boxes of 0 to 1 pixels."""
    proto = models.model("float[N,3,8,12] x) => (float[N,48,6] y", "y = Reshape(x, s)", {"s": np.array([-1, 48, 6])})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    rule = Detect("y", form="anchors_first")
    for most in (1.0, 1.2):  # some boxes may exceed the image
        values = np.random.default_rng(1).random((16, 3, 8, 12), np.float32) * np.float32(most)
        samples = CalibrationSet({"x": values}, None)
        request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True, detect=rule)
        with pytest.raises(ConfigInvalid, match=r"the boxes in output 'y' are 0 to 1: .* normalized = true"):
            evaluate_source(request)
        evaluate_source(replace(request, detect=replace(rule, normalized=True)))


def test_boxes_that_are_relative_to_cells_are_not_read_as_pixels(tmp_path: Path) -> None:
    """YOLOX's default export. Earlier code packed such a rule, and devices answered wrong boxes."""
    proto = models.model("float[N,3,8,63] x) => (float[N,189,8] y", "y = Reshape(x, s)", {"s": np.array([-1, 189, 8])})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    rule = Detect("y", form="anchors_first", objectness=True)
    raw, decoded = yolox(96, images=16)
    for boxes, refused in ((raw, True), (decoded, False)):
        samples = CalibrationSet({"x": boxes.reshape(16, 3, 8, 63)}, None)
        request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True, detect=rule)
        match = r"the boxes in output 'y' are not decoded: .* --decode_in_inference"
        with pytest.raises(ConfigInvalid, match=match) if refused else contextlib.nullcontext():
            evaluate_source(request)


def test_every_bucket_needs_samples_and_gets_a_golden_sample(tmp_path: Path) -> None:
    source = source_in("tokens=8,16,32")
    every, short = samples_of(source, texts(40)), samples_of(source, [text(2 + i % 12, i) for i in range(40)])

    def request(calibration: CalibrationSet, holdout: CalibrationSet) -> BuildRequest:
        return BuildRequest(source, calibration, holdout, (profile("one"),), "m", allow_overlap=True)

    evaluation = evaluate_source(request(every, every))
    assert set(every.sizes[evaluation.golden].tolist()) == {8, 16, 32}
    with pytest.raises(
        CalibrationInvalid, match="no calibration sample is for bucket 32, which holds lengths of 17 to 32"
    ):
        evaluate_source(request(short, every))
    with pytest.raises(CalibrationInvalid, match="no hold-out sample is for bucket 32"):
        evaluate_source(request(every, short))
