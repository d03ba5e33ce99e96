"""The accuracy gate: what passes, what a class or slice may lose, and how artifacts are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.buckets import Buckets, PaddedInput
from edgert.bundle.manifest import Accuracy
from edgert.engines import Session
from edgert.errors import EngineFailed
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy import accuracy_gate as gate
from edgert_deploy.packager.accuracy.accuracy_gate import (
    BATCH,
    GROUP_SAMPLES_MIN,
    Limits,
    artifact_outputs,
    judged_outputs,
    local_artifact,
    reference_outputs,
    run_here,
    run_samples,
)
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.samples.lengths import stack_all
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import build
from tests.support.models.metrics import EYE, SCORES, reference_to, result_of, worst
from tests.support.models.texts import answers_to, samples_of, source_in, text


def warnings(reference: list[Any], labels: list[int] | None, metric: str = "auto", max_drop: float = 1.0) -> list[str]:
    given = reference_to((SCORES,), reference, None if labels is None else np.asarray(labels))
    return gate.warnings(metric_for(metric, given), given, Limits(max_drop))


def test_a_source_no_better_than_chance_is_a_warning() -> None:
    assert warnings([EYE], [0, 1, 2]) == []
    (warning,) = warnings([EYE[[1, 2, 0]]], [0, 1, 2])
    assert "top-1 is 0.0000" in warning
    assert "chance is 0.3333" in warning
    # Three of four labels are class 0: naming it always is right in 0.75.
    (warning,) = warnings([EYE[[0, 0, 0, 0]]], [0, 0, 0, 1])
    assert "chance is 0.7500" in warning
    assert warnings([EYE[[1, 2, 0]]], [0, 1, 2], "cosine") == []


def test_a_gate_that_knows_only_similarity_says_so() -> None:
    (warning,) = warnings([models.random(6, 3) - 0.5], None)
    assert warning.startswith("similarity only")
    assert "--metric" in warning


@pytest.mark.parametrize(
    ("reference", "named"),
    [
        (EYE[[1] * 20], "top1_agreement"),  # one class only
        (np.linspace(0.01, 0.3, 20, dtype=np.float32)[:, None], "values"),
        (np.zeros((20, 1), np.float32), "values"),
        (np.full((20, 84, 1000), 0.01, np.float32) * np.array([[3000]] * 4 + [[1]] * 80, np.float32), "anchors"),
    ],
)
def test_a_hold_out_whose_answers_are_all_alike_is_a_warning(reference: Any, named: str) -> None:
    """A broken artifact that always answers the same would pass: a detector that finds nothing, a word never said."""
    found = [text for text in warnings([reference], None, max_drop=0.01) if "so alike that an artifact which" in text]
    assert len(found) == int(named != "values" or not reference.any()), found
    assert all(named in text for text in found)


def test_too_few_samples_for_the_limit_are_a_warning_with_the_number_needed() -> None:
    labels = np.tile([0, 1, 2], 99).tolist()
    (warning,) = warnings([EYE[labels]], labels, max_drop=0.01)
    assert warning.startswith("297 hold-out samples: too few for --max-drop 0.01")
    assert "may be 0.0101" in warning
    assert warning.endswith("at least 300")
    (warning,) = warnings([EYE[labels]], None, max_drop=0.001)
    assert warning.endswith("at least 3000")
    assert warnings([EYE[[*labels, 0, 1, 2]]], [*labels, 0, 1, 2], max_drop=0.01) == []
    assert warnings([EYE[labels]], labels, "cosine", max_drop=0.01) == []


def test_the_drop_has_an_interval_where_the_metric_counts_samples() -> None:
    labels = np.repeat([0, 1, 2], 40)
    answers = EYE[labels].copy()
    answers[:6] = EYE[2]
    for truth in (labels, None):
        low, high = result_of(reference_to((SCORES,), [EYE[labels]], truth), [answers]).drop_interval or (0.0, 0.0)
        assert 0.0 < low < 6 / 120 < high < 0.12
    low, high = result_of(reference_to((SCORES,), [EYE[labels]]), [EYE[labels]]).drop_interval or (1.0, 1.0)
    assert (low, round(high, 4)) == (0.0, round(3.8415 / 123.8415, 4))
    assert result_of(reference_to((SCORES,), [EYE[labels]]), [answers], metric="cosine").drop_interval is None


def test_a_drop_equal_to_the_limit_passes() -> None:
    assert Accuracy("top1", 100, 0.99, 0.98, 0.01).passed
    assert not Accuracy("top1", 1000, 0.99, 0.979, 0.01).passed


def test_batches_come_back_in_order_and_whole(tmp_path: Path) -> None:
    source = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(77, 4)}, None)  # no multiple of the batch
    whole = reference_outputs(source, samples)[0]
    for i in (0, 31, 32, 76):
        one = reference_outputs(source, CalibrationSet({"x": samples.inputs["x"][i : i + 1]}, None))[0]
        np.testing.assert_allclose(whole[i], one[0], rtol=1e-5)


def test_an_engine_compiles_an_artifact_for_one_size_of_batches(
    digits_source: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openvino: Any = pytest.importorskip("openvino")
    artifact = build("openvino", digits_source, CalibrationSet({}, None), "fp32", tmp_path)
    compile_model, compiled = openvino.Core.compile_model, []

    def noted(core: Any, model: Any, *options: Any) -> Any:
        compiled.append(model.inputs[0].shape[0])
        return compile_model(core, model, *options)

    monkeypatch.setattr(openvino.Core, "compile_model", noted)
    for count, size in ((77, 26), (32, 32), (3, 3)):
        samples = CalibrationSet({"image": models.random(count, 1, 8, 8)}, None)
        answers = run_here(samples, local_artifact(artifact, digits_source), 0, {}, BATCH)[0]
        np.testing.assert_allclose(answers, reference_outputs(digits_source, samples)[0], atol=1e-4)
        assert compiled.pop() == size
        assert compiled == []


def test_the_artifact_is_run_by_the_engine_that_judges_it(digits_source: SourceModel, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"garbage")
    artifact = Artifact("tensorrt", "int8", tmp_path / "model.onnx", (), "onnxruntime", {})
    samples = CalibrationSet({"image": models.random(8, 1, 8, 8)}, None)
    with pytest.raises(EngineFailed, match="onnxruntime"):
        artifact_outputs(artifact, digits_source, samples)


def test_run_samples_gives_fixed_models_one_sample_at_a_time() -> None:
    class One(Session):
        inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", (1, 4)),)
        outputs: tuple[TensorSpec, ...] = inputs

        def run(self, tensors: Sequence[Any]) -> list[Any]:
            assert len(tensors[0]) == 1
            return list(tensors)

        def close(self) -> None: ...

    x = models.random(5, 4)
    np.testing.assert_array_equal(run_samples(One(), [x])[0], x)


def test_a_class_and_a_slice_that_the_mean_hides_are_named_and_can_fail_the_gate() -> None:
    labels = np.repeat([0, 1, 2], 40)
    reference = EYE[labels]
    answers = reference.copy()
    answers[40:52] = EYE[0]  # 12 of class 1, all at night
    asked = reference_to(
        (SCORES,), [reference], labels, slices=np.array(["night" if 40 <= i < 60 else "day" for i in range(120)])
    )
    found = result_of(asked, [answers], Limits(0.1))
    assert found.passed
    worst_class, worst_slice = worst(found, "class"), worst(found, "slice")
    assert (worst_class.name, worst_class.samples, round(worst_class.drop, 4)) == ("1", 40, 0.3)
    assert (worst_slice.name, worst_slice.samples, round(worst_slice.drop, 4)) == ("night", 20, 0.6)
    strict = result_of(asked, [answers], Limits(0.1, max_class_drop=0.2))
    assert not strict.passed
    assert "slice 'night' lost 0.6000" in strict.loss()


def test_a_class_of_a_few_samples_is_shown_but_fails_no_build() -> None:
    labels = np.array([0] * 100 + [1] * (GROUP_SAMPLES_MIN - 1))
    reference = EYE[labels]
    found = result_of(reference_to((SCORES,), [reference], labels), [EYE[np.zeros_like(labels)]], Limits(0.5, 0.1))
    assert found.passed
    assert [g.artifact for g in found.groups] == [1.0, 0.0]


def test_a_bucket_that_lost_too_much_fails_whatever_the_mean_is() -> None:
    labels = np.tile([0, 1, 2], 40)
    answers = EYE[labels].copy()
    answers[110:] = EYE[0]  # 7 of the 10 samples of the largest bucket are wrong
    buckets = Buckets("tokens", (8, 16), (PaddedInput("x", 1),))
    asked = reference_to((SCORES,), [EYE[labels]], labels)
    lengths = np.array([5] * 110 + [12] * 10)
    asked = replace(asked, holdout=replace(asked.holdout, lengths=lengths, buckets=buckets))
    result = result_of(asked, [answers], Limits(0.2))
    assert result.accuracy.passed
    assert [(g.name, g.samples) for g in result.groups if g.kind == "bucket"] == [("8", 110), ("16", 10)]
    assert [g.name for g in result.failed_groups] == ["16"]
    assert not result.passed
    assert "bucket '16' lost" in result.loss()


def test_a_model_with_buckets_is_compared_with_its_own_answers_to_unpadded_samples(tmp_path: Path) -> None:
    # The mean over the length: padding changes the answer, and the gate must see that.
    body = "y = ReduceMean <axes = [1], keepdims = 0> (x)"
    proto = models.model("float[N,T,3] x) => (float[N,3] y", body)
    source = load_source(models.write(proto, tmp_path / "m.onnx"), Conversion(buckets=read_buckets("T=4,8")))
    assert source.buckets is not None
    rows = [np.full((length, 3), 1.0, np.float32) for length in (2, 4, 6, 8)]
    arrays = stack_all("rows", source.inputs, [rows], source.buckets)
    samples = CalibrationSet({"x": arrays["x"]}, None, lengths=arrays["lengths"], buckets=source.buckets)
    (want,) = reference_outputs(source, samples)
    assert want[:, 0].tolist() == [1.0] * 4
    (got,) = artifact_outputs(build("onnxruntime", source, samples, "fp32", tmp_path / "out"), source, samples)
    assert got[:, 0].tolist() == [0.5, 1.0, 0.75, 1.0]


def test_answers_of_different_lengths_are_filled_up_with_their_last_element() -> None:
    source = source_in("tokens=8,32")
    rows = [text(3), text(20)]
    scores, states = reference_outputs(source, samples_of(source, rows))
    assert (scores.shape, states.shape) == ((2, 4), (2, 32, 16))
    for i, row in enumerate(rows):
        want = answers_to(row)["states"]
        np.testing.assert_allclose(states[i, : len(want)], want, atol=1e-5)
        np.testing.assert_allclose(
            states[i, len(want) :], np.broadcast_to(want[-1], states[i, len(want) :].shape), atol=1e-5
        )


def test_answers_that_differ_between_one_sample_and_a_batch_are_judged_both_ways(tmp_path: Path) -> None:
    """OpenVINO computes an INT8 LSTM with other kernels for a batch of 1: most requests of a device hold one sample."""
    body = (
        "s = Shape(x) n = Gather(s, zero) one = Constant<value_int=1>() a = Equal(n, one) m = Neg(x) y = Where(a, m, x)"
    )
    source = load_source(
        models.write(models.model("float[N,4] x) => (float[N,4] y", body, {"zero": np.array(0)}), tmp_path / "m.onnx")
    )
    samples = CalibrationSet({"x": models.random(40, 4)}, None)
    batches, alone = judged_outputs(build("onnxruntime", source, samples, "fp32", tmp_path), source, samples)
    np.testing.assert_array_equal(batches[0], samples.inputs["x"])
    np.testing.assert_array_equal(alone[0], -samples.inputs["x"])
    same = load_source(models.write(models.model("float[N,4] x) => (float[N,4] y", "y = Neg(x)"), tmp_path / "s.onnx"))
    assert len(judged_outputs(build("onnxruntime", same, samples, "fp32", tmp_path), same, samples)) == 1
