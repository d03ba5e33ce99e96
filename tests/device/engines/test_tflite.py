"""The TFLite engine over artifacts of its own builder: contract, buckets, failures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.engines import EngineOptions, LocalArtifact, Session
from edgert.engines.tflite import TFLiteEngine
from edgert.errors import EngineFailed, EngineMissing
from edgert.tensors import TensorSpec

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

import onnx
from onnx import numpy_helper, parser

from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import Artifact, BuildSpec, Precision, tflite
from edgert_deploy.packager.builders.tflite import ONE_BY_ONE, TFLiteBuilder
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel
from tests.support import models

PROFILE = DeviceProfile("test", "", (), ("tflite",), "int8", "3.10", "2.34", 512, "/run/edgert.sock")
CNN = "c = Conv<pads=[1,1,1,1]>(x, w) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) y = Gemm(f, v) z = Sigmoid(y)"
ITEM = (3, 8, 8)
BUCKETS = (1, 4, 8)


def source_of(
    body: str = CNN,
    inputs: str = "float[N,3,8,8] x",
    outputs: str = "float[N,5] z, float[N,5] y",
    **constants: NDArray[Any],
) -> SourceModel:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => ({outputs}) {{ {body} }}')
    for name, array in (constants or {"w": models.random(6, 3, 3, 3), "v": models.random(6, 5)}).items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    specs = [tuple(map(_spec, values)) for values in (model.graph.input, model.graph.output)]
    return SourceModel(Path("model.onnx"), model, "0" * 64, model.ByteSize(), specs[0], specs[1])


def _spec(value: Any) -> TensorSpec:
    datatype = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.INT64: "INT64"}[value.type.tensor_type.elem_type]
    dims = value.type.tensor_type.shape.dim
    return TensorSpec(value.name, datatype, tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims))


def samples_of(source: SourceModel, count: int = 40) -> CalibrationSet:
    return CalibrationSet({spec.name: models.random(count, *spec.item_shape) for spec in source.inputs}, None)


def build(source: SourceModel, out_dir: Path, precision: Precision = "fp32") -> Artifact:
    out_dir.mkdir(exist_ok=True)
    return TFLiteBuilder().build(
        BuildSpec("tflite", precision, PROFILE), source, samples_of(source), out_dir, lambda step: None
    )


def load(source: SourceModel, path: Path, buckets: tuple[int, ...] = BUCKETS) -> Session:
    artifact = LocalArtifact("tflite", path, source.inputs, source.outputs, "")
    return TFLiteEngine().load(artifact, EngineOptions(buckets=buckets))


@pytest.fixture(params=["fp32", "int8"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Session:
    source = source_of()
    return load(source, build(source, tmp_path, request.param).path)


@pytest.mark.parametrize("count", [1, 2, 4, 7, 8, 19])
def test_a_batch_gives_the_answers_of_its_single_items(session: Session, count: int) -> None:
    images = models.random(count, *ITEM, seed=1)
    alone = [session.run([images[i : i + 1]]) for i in range(count)]
    for answers, parts in zip(session.run([images]), zip(*alone, strict=True), strict=True):
        assert answers.shape == (count, 5)
        np.testing.assert_array_equal(answers, np.concatenate(parts))


def test_rows_of_an_earlier_larger_batch_leave_no_trace(session: Session) -> None:
    few = models.random(2, *ITEM, seed=1)
    before = session.run([few])
    session.run([np.full((3, *ITEM), 1e6, np.float32)])
    for one, other in zip(before, session.run([few]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_outputs_come_in_the_contract_s_order(session: Session) -> None:
    z, y = session.run([models.random(1, *ITEM)])
    np.testing.assert_allclose(z, 1 / (1 + np.exp(-y)), atol=0.01)


@pytest.mark.parametrize("count", [1, 3])
def test_an_answer_does_not_change_with_the_next_run(session: Session, count: int) -> None:
    answers = session.run([models.random(count, *ITEM, seed=1)])
    copies = [answer.copy() for answer in answers]
    session.run([models.random(count, *ITEM, seed=2)])
    for answer, copy in zip(answers, copies, strict=True):
        np.testing.assert_array_equal(answer, copy)
        assert answer.flags.c_contiguous
        assert answer.flags.writeable


def test_inputs_are_matched_by_name(tmp_path: Path) -> None:
    inputs = "float[N,4] a, float[N,4] b"
    source = source_of("y = Sub(a, k) z = Sub(b, y)", inputs, "float[N,4] z, float[N,4] y", k=models.random(4))
    path = build(source, tmp_path).path
    turned = SourceModel(source.path, source.proto, "", 0, source.inputs[::-1], source.outputs[::-1])
    a, b = models.random(3, 4, seed=1), models.random(3, 4, seed=2)
    for one, other in zip(load(source, path).run([a, b]), load(turned, path).run([b, a])[::-1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_token_ids_are_padded_with_valid_ids(tmp_path: Path) -> None:
    source = source_of(
        "e = Gather(t, x) y = ReduceMean<axes=[1]>(e)", "int64[N,3] x", "float[N,1,6] y", t=models.random(7, 6)
    )
    calibration = CalibrationSet({"x": np.zeros((4, 3), np.int64)}, None)
    path = (
        TFLiteBuilder().build(BuildSpec("tflite", "int8", PROFILE), source, calibration, tmp_path, lambda _: None).path
    )
    session, ids = load(source, path), np.array([[0, 1, 2], [3, 4, 5], [6, 6, 6]])
    alone = np.concatenate([session.run([ids[i : i + 1]])[0] for i in range(3)])
    np.testing.assert_array_equal(session.run([ids])[0], alone)


def test_a_model_with_a_fixed_batch_runs_only_this_batch(tmp_path: Path) -> None:
    source = source_of("y = Softmax(x)", "float[2,4] x", "float[2,4] y", unused=models.random(1))
    session = load(source, build(source, tmp_path, "int8").path)
    (answer,) = session.run([models.random(2, 4)])
    np.testing.assert_allclose(answer.sum(axis=1), 1, atol=0.02)
    with pytest.raises(EngineFailed):
        session.run([models.random(3, 4)])


def test_answers_without_a_batch_axis_are_not_padded(tmp_path: Path) -> None:
    source = source_of("y = ReduceMax<axes=[0], keepdims=0>(x)", "float[N,4] x", "float[4] y", unused=models.random(1))
    session = load(source, build(source, tmp_path).path)
    for count in (1, 3, 20, 2):
        rows = -1 - np.abs(models.random(count, 4))  # a padded row of zeros would have the largest value
        np.testing.assert_array_equal(session.run([rows])[0], rows.max(axis=0))


@pytest.mark.parametrize(
    "tensor",
    [models.random(1, 3, 8, 9), models.random(1, 3, 8, 8).astype(np.float64), models.random(1, 192)],
    ids=["shape", "dtype", "rank"],
)
def test_a_wrong_tensor_is_refused_and_the_session_continues(session: Session, tensor: NDArray[Any]) -> None:
    with pytest.raises(EngineFailed, match=r"model\.tflite"):
        session.run([tensor])
    assert session.run([models.random(1, *ITEM)])[0].shape == (1, 5)


def test_a_closed_session_refuses_runs(session: Session) -> None:
    session.close()
    with pytest.raises(EngineFailed, match="closed"):
        session.run([models.random(1, *ITEM)])


def test_a_file_that_is_not_a_model_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"no model")
    with pytest.raises(EngineFailed, match=r"model\.tflite"):
        load(source_of(), path)


def test_a_file_with_another_contract_does_not_load(tmp_path: Path) -> None:
    path = build(source_of(), tmp_path).path
    other = source_of("q = Relu(p)", "float[N,4] p", "float[N,4] q")
    with pytest.raises(EngineFailed, match=r"expected .*p"):
        load(other, path)


def test_without_an_sdk_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ai_edge_litert.interpreter", "tflite_runtime.interpreter"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EngineMissing, match=r"pip install 'edgert\[tflite\]'"):
        TFLiteEngine().version()


# --- the builder


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_two_builds_give_the_same_bytes(tmp_path: Path, precision: Precision) -> None:
    one, other = (build(source_of(), tmp_path / name, precision) for name in ("one", "other"))
    assert one.path.read_bytes() == other.path.read_bytes()


def test_int8_is_smaller(tmp_path: Path) -> None:
    source = source_of("y = MatMul(x, w)", "float[N,64] x", "float[N,256] y", w=models.random(64, 256))
    sizes = [build(source, tmp_path / p, p).path.stat().st_size for p in ("fp32", "int8")]
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize("buckets", [BUCKETS, (4,)])
def test_items_run_one_by_one_if_the_lowering_needs_a_fixed_batch(tmp_path: Path, buckets: tuple[int, ...]) -> None:
    """GatherElements needs the length of the batch, which the model leaves open."""
    source = source_of(
        "y = GatherElements<axis=1>(x, i)", "float[N,3] x, int64[N,2] i", "float[N,2] y", unused=models.random(1)
    )
    artifact = build(source, tmp_path)
    assert artifact.remarks == (ONE_BY_ONE,)
    session = load(source, artifact.path, buckets)
    x, places = models.random(5, 3), np.array([[0, 2], [1, 1], [2, 0], [2, 2], [0, 1]])
    for count in (1, 3, 5):
        (answer,) = session.run([x[:count], places[:count]])
        np.testing.assert_array_equal(answer, np.take_along_axis(x, places, 1)[:count])


def test_items_run_one_by_one_if_the_interpreter_refuses_a_larger_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of()
    batched = build(source, tmp_path / "batched")
    monkeypatch.setattr(tflite, "TRIAL_BATCHES", (1, -2))  # the interpreter refuses a batch of -2
    single = build(source, tmp_path / "single")
    assert (batched.remarks, single.remarks) == ((), (ONE_BY_ONE,))
    images = models.random(5, *ITEM, seed=1)
    answers = (load(source, artifact.path).run([images]) for artifact in (batched, single))
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
