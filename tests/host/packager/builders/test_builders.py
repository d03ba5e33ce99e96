"""One contract test for every builder: the artifact runs and is accurate enough.

tests/host/cli/test_build.py tests that every builder makes the same bytes each time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.manifest import FILE_PATH
from edgert.engines import ENGINES
from edgert.errors import ConfigInvalid
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.accuracy.accuracy_gate import Limits, judge
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.builders import BuildSpec, Precision, builder_for
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build, samples_for
from tests.support.models.texts import samples_of, source_in, texts
from tests.support.profiles import profile


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_int8_keeps_the_accuracy_and_is_smaller(
    engine: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    digits_source: SourceModel,
    digits_calibration: CalibrationSet,
    digits_holdout: CalibrationSet,
) -> None:
    artifact = build(engine, digits_source, digits_calibration, "int8", tmp_path / "out")
    assert capfd.readouterr().out == ""
    assert (artifact.engine, artifact.precision, artifact.judged_by in ENGINES) == (engine, "int8", True)
    files = (artifact.path, *artifact.companions)
    assert set(files) == set((tmp_path / "out").iterdir())
    assert all(FILE_PATH.fullmatch(path.name) for path in files)
    assert sum(path.stat().st_size for path in files) < digits_source.size_bytes
    assert artifact.tools
    want = reference_outputs(digits_source, digits_holdout)
    got = artifact_outputs(artifact, digits_source, digits_holdout)
    reference = Reference(digits_source.outputs, want, digits_holdout)
    accuracy = judge(metric_for("top1", reference), reference, got, Limits(0.01)).accuracy
    assert (accuracy.metric, accuracy.passed, accuracy.fp32 >= 0.98) == ("top1", True, True)
    assert not np.array_equal(want[0], got[0])  # the artifact is really quantized


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_fp32_gives_the_answers_of_the_source(
    engine: str, tmp_path: Path, digits_source: SourceModel, digits_holdout: CalibrationSet
) -> None:
    artifact = build(engine, digits_source, digits_holdout, "fp32", tmp_path / "out")
    want = reference_outputs(digits_source, digits_holdout)
    got = artifact_outputs(artifact, digits_source, digits_holdout)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
@pytest.mark.parametrize("make", [models.transformer, models.two_by_two, models.cnn], ids=lambda make: make.__name__)
def test_other_kinds_of_models_keep_their_answers(engine: str, make: Callable[[], Any], tmp_path: Path) -> None:
    source = load_source(models.write(make(), tmp_path / "m.onnx"))
    samples = samples_for(source)
    artifact = build(engine, source, samples, "int8", tmp_path / "out")
    want, got = reference_outputs(source, samples), artifact_outputs(artifact, source, samples)
    for one, other in zip(want, got, strict=True):
        cosine = (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other)
        assert cosine > 0.99


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_model_with_a_batch_fixed_to_one_is_built(engine: str, tmp_path: Path) -> None:
    source = load_source(models.write(models.mlp("float[1,4] x) => (float[1,3] scores"), tmp_path / "m.onnx"))
    samples = samples_for(source)
    artifact = build(engine, source, samples, "int8", tmp_path / "out")
    want, got = reference_outputs(source, samples), artifact_outputs(artifact, source, samples)
    np.testing.assert_allclose(got[0], want[0], atol=0.05 * np.ptp(want[0]))


def of_opset(opset: int) -> Any:
    """Return a network of operators that opsets changed: Clip (11), Softmax, Squeeze (13), ReduceMean (18)."""
    from onnx import helper

    squeeze = "q = Squeeze <axes = [2, 3]> (p)" if opset < 13 else "q = Squeeze (p, axes)"
    reduce = "m = ReduceMean <axes = [1], keepdims = 1> (q)" if opset < 18 else "m = ReduceMean <keepdims = 1> (q, one)"
    clip = "r = Clip <min = 0.0, max = 6.0> (c)" if opset < 11 else "r = Clip(c, low, high)"
    body = f"""
        c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1, b1)
        {clip}
        p = GlobalAveragePool(r)
        {squeeze} {reduce}
        d = Sub(q, m) g = Gemm(d, w2, b2) scores = Softmax <axis = 1> (g)
    """
    weights: dict[str, Any] = {"w1": models.random(8, 2, 3, 3), "b1": models.random(8), "b2": models.random(4)}
    weights |= {"w2": models.random(8, 4)}
    weights |= {"low": np.float32(0), "high": np.float32(6)} if opset >= 11 else {}
    weights |= {"axes": np.array([2, 3])} if opset >= 13 else {}
    weights |= {"one": np.array([1])} if opset >= 18 else {}
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    signature = "float[N,2,6,6] x) => (float[N,4] scores"
    proto = models.model(signature, body, arrays, opset=opset, ir_version=ir_version)
    if ir_version < 4:  # IR 3 lists weights as inputs, too
        values = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in proto.graph.initializer]
        proto.graph.input.extend(values)
    return proto


def newest_opset() -> int:
    from onnx import defs

    return int(defs.onnx_opset_version())


@pytest.fixture(scope="module")
def answers_of_17(tmp_path_factory: pytest.TempPathFactory) -> tuple[CalibrationSet, Any]:
    source = load_source(models.write(of_opset(17), tmp_path_factory.mktemp("opset") / "17.onnx"))
    samples = samples_for(source)
    return samples, reference_outputs(source, samples)[0]


@pytest.mark.parametrize("opset", range(7, newest_opset() + 1))
def test_every_opset_is_built_for_every_engine(
    opset: int, answers_of_17: tuple[CalibrationSet, Any], tmp_path: Path
) -> None:
    source, (samples, want) = load_source(models.write(of_opset(opset), tmp_path / "m.onnx")), answers_of_17
    assert 13 <= opset_of(source.proto) <= 21  # the opset that runtimes on devices accept
    assert source.proto.ir_version <= 10
    np.testing.assert_allclose(reference_outputs(source, samples)[0], want, rtol=1e-5, atol=1e-6)
    quantized = opset in (7, 13, newest_opset())
    for engine in ENGINE_NAMES:
        artifact = build(engine, source, samples, "int8" if quantized else "fp32", tmp_path / engine)
        got = artifact_outputs(artifact, source, samples)[0]
        np.testing.assert_allclose(got, want, atol=0.05 if quantized else 1e-4, err_msg=engine)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_weights_that_an_old_model_lists_as_inputs_are_quantized_as_weights(engine: str, tmp_path: Path) -> None:
    """Exporters of IR 3 listed weights as inputs.

    ONNX Runtime folded a weight, and its quantizer missed it.
    """
    body = "k = ConstantOfShape<value = float[1] {0.02}>(s) c = Conv(x, k) r = Relu(c) f = Flatten(r) y = MatMul(f, w)"
    from onnx import helper

    weights = {"s": np.array([4, 2, 3, 3]), "w": models.random(4 * 36, 5)}
    proto = models.model("float[N,2,8,8] x) => (float[N,5] y", body, weights, opset=9, ir_version=3)
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    source = load_source(models.write(proto, tmp_path / "old.onnx"))
    assert [value.name for value in source.proto.graph.input] == ["x"]
    samples = CalibrationSet({"x": models.random(16, 2, 8, 8)}, None)
    artifact = build(engine, source, samples, "int8", tmp_path)
    want, got = reference_outputs(source, samples)[0], artifact_outputs(artifact, source, samples)[0]
    np.testing.assert_allclose(got, want, atol=0.05 * float(np.ptp(want)))


def test_the_error_names_an_engine_without_a_builder() -> None:
    with pytest.raises(ConfigInvalid, match="null"):
        builder_for("null")


def test_arm_and_x86_share_all_artifacts_except_int8_of_onnx_runtime() -> None:
    arm, x86 = profile("a", "onnxruntime", "aarch64"), profile("b", "onnxruntime", "x86_64")
    assert BuildSpec("onnxruntime", "int8", arm).id != BuildSpec("onnxruntime", "int8", x86).id
    assert BuildSpec("onnxruntime", "fp32", arm).id == BuildSpec("onnxruntime", "fp32", x86).id
    tflite = [BuildSpec("tflite", "int8", load_profile(name)).id for name in ("raspberry-pi-4", "raspberry-pi-5")]
    assert tflite == ["tflite-int8"] * 2


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_model_with_buckets_gives_the_answers_of_the_source_at_every_length(engine: str, tmp_path: Path) -> None:
    source = source_in("tokens=8,16,32")
    calibration, holdout = (samples_of(source, texts(48, seed=seed)) for seed in (0, 500))
    want = reference_outputs(source, holdout)
    for precision, least in (("fp32", 0.99999), ("int8", 0.99)):
        artifact = build(engine, source, calibration, cast(Precision, precision), tmp_path / precision)
        got = artifact_outputs(artifact, source, holdout)
        for one, other in zip(want, got, strict=True):
            for size in (8, 16, 32):
                a, b = one[holdout.sizes == size], other[holdout.sizes == size]
                assert (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) > least, (precision, size)
    assert len(artifact.companions) == {"tflite": 2, "openvino": 1}.get(engine, 0)


@pytest.mark.parametrize("recipe", ["percentile", "entropy"])
def test_histograms_of_activations_accept_buckets_of_several_sizes(recipe: str, tmp_path: Path) -> None:
    source = source_in("tokens=8,16,32")
    calibration, holdout = (samples_of(source, texts(24, seed=seed)) for seed in (0, 500))
    spec = BuildSpec("onnxruntime", "int8", load_profile("this-machine"), (), recipe)
    artifact = builder_for("onnxruntime").build(spec, source, calibration, tmp_path, lambda line: None)
    for one, other in zip(reference_outputs(source, holdout), artifact_outputs(artifact, source, holdout), strict=True):
        assert (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other) > 0.98
