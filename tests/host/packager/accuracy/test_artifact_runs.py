"""Artifacts answer samples in the engine that judges them: in order, in batches of one size, and alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.engines import Session
from edgert.errors import EngineFailed
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.artifact_runs import (
    BATCH,
    artifact_outputs,
    judged_outputs,
    local_artifact,
    reference_outputs,
    run_here,
    run_samples,
)
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.samples.lengths import stack_all
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import build
from tests.support.models.texts import answers_to, samples_of, source_in, text


def test_the_answers_of_all_batches_are_returned_in_order(tmp_path: Path) -> None:
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


def test_an_artifact_runs_on_the_engine_that_judges_it(digits_source: SourceModel, tmp_path: Path) -> None:
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


def test_a_model_with_buckets_is_compared_with_its_own_answers_to_unpadded_samples(tmp_path: Path) -> None:
    # Padding changes the mean over the length, and the gate must notice the changed answer.
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


def test_answers_of_different_lengths_are_padded_with_their_last_element() -> None:
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


def test_answers_that_differ_between_one_sample_and_a_batch_are_both_judged(tmp_path: Path) -> None:
    """OpenVINO has other kernels for an INT8 LSTM in a batch of 1, and most requests to a device hold one sample."""
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
