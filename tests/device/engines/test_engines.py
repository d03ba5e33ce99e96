"""One contract for every engine that runs here, and the parts of TensorRT that need no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.buckets import Buckets, PaddedInput
from edgert.engines import ENGINES, FOR_TESTS, Engine, EngineOptions, LocalArtifact, Session, bucket_for, engine_by_name
from edgert.engines.sdk_versions import engine_versions
from edgert.engines.tensorrt import plan_name
from edgert.errors import ConfigInvalid, EngineFailed, EngineMissing
from edgert.machine import process_mb
from edgert.tensors import TensorSpec
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.builders import BUILDERS, BuildSpec, builder_for
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models

OPTIONS = EngineOptions(threads=1, buckets=(1, 2, 4, 8))
VENDORS = [
    name for name, kind in ENGINES.items() if kind.packages and not kind.system_package
]  # these engines run anywhere
SUM_IN, SUM_OUT = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 2))


class Loaded:
    """A session, and another way to compute the same model's answers."""

    def __init__(
        self, session: Session, artifact: LocalArtifact, reference: Callable[[list[Any]], list[Any]], engine: str
    ) -> None:
        self.session, self.artifact, self.reference, self.engine = session, artifact, reference, engine

    def inputs(self, count: int, seed: int = 0) -> list[Any]:
        return [models.random(count, *s.item_shape, seed=seed + i) for i, s in enumerate(self.artifact.inputs)]


def artifact_of(engine: str, source: SourceModel, folder: Path) -> LocalArtifact:
    out = folder / engine
    out.mkdir()
    samples = CalibrationSet({spec.name: models.random(16, *spec.item_shape) for spec in source.inputs}, None)
    spec = BuildSpec(engine, "fp32", load_profile("this-machine"))
    built = builder_for(engine).build(spec, source, samples, out, lambda line: None)
    return LocalArtifact(engine, built.path, source.inputs, source.outputs, engine * 4)


def onnx_reference(proto: Any) -> Callable[[list[Any]], list[Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda arrays: list(
        session.run(None, dict(zip([i.name for i in session.get_inputs()], arrays, strict=True)))
    )


def null_reference(arrays: list[Any]) -> list[Any]:
    return [np.repeat(arrays[0].sum(axis=1, keepdims=True), 2, axis=1)]


@pytest.fixture(scope="module", params=["null", *VENDORS])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    engine, folder = str(request.param), tmp_path_factory.mktemp("engine")
    reference: Callable[[list[Any]], list[Any]] = null_reference
    if engine == "null":
        (folder / "model.json").write_text(json.dumps({"op": "sum"}))
        artifact = LocalArtifact("null", folder / "model.json", (SUM_IN,), (SUM_OUT,), "0")
    else:
        pytest.importorskip(ENGINES[engine].packages[0])
        if importlib.util.find_spec(BUILDERS[engine].partition(":")[0]) is None:
            pytest.skip(f"no builder for {engine}")
        proto = models.two_by_two()
        source = load_source(models.write(proto, folder / "m.onnx"))
        artifact, reference = artifact_of(engine, source, folder), onnx_reference(proto)
    session = engine_by_name(engine).load(artifact, OPTIONS)
    yield Loaded(session, artifact, reference, engine)
    session.close()


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_a_batch_of_any_size_gets_the_reference_answers_in_order(loaded: Loaded, count: int) -> None:
    given = loaded.inputs(count)
    answers = loaded.session.run(given)
    for answer, want, spec in zip(answers, loaded.reference(given), loaded.session.outputs, strict=True):
        assert (answer.dtype, answer.shape) == (spec.dtype, (count, *spec.item_shape))
        np.testing.assert_allclose(answer, want, rtol=1e-5, atol=1e-5)


def test_alternating_batch_sizes_do_not_leak_into_each_other(loaded: Loaded) -> None:
    for seed, count in enumerate([8, 1, 5, 2, 8, 3, 1]):
        given = loaded.inputs(count, seed=100 * seed)
        for answer, want in zip(loaded.session.run(given), loaded.reference(given), strict=True):
            np.testing.assert_allclose(answer, want, rtol=1e-5, atol=1e-5)


def test_an_answer_does_not_change_with_the_next_run(loaded: Loaded) -> None:
    given = loaded.inputs(4)
    first = loaded.session.run(given)
    kept = [array.copy() for array in first]
    given_before = [array.copy() for array in given]
    loaded.session.run(loaded.inputs(4, seed=9))
    for array, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert array.flags.writeable
        array[:] = 0
    for array, copy in zip(given, given_before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_read_only_inputs_are_accepted(loaded: Loaded) -> None:
    given = loaded.inputs(2)
    for array in given:
        array.flags.writeable = False
    for answer, want in zip(loaded.session.run(given), loaded.reference(given), strict=True):
        np.testing.assert_allclose(answer, want, rtol=1e-5, atol=1e-5)


def test_the_session_states_the_models_contract(loaded: Loaded) -> None:
    assert loaded.session.inputs == loaded.artifact.inputs
    assert loaded.session.outputs == loaded.artifact.outputs
    assert engine_by_name(loaded.engine).version()


def test_prepare_and_load_may_be_repeated(loaded: Loaded, tmp_path: Path) -> None:
    engine = engine_by_name(loaded.engine)
    options = EngineOptions(threads=2, cache_dir=tmp_path)
    for _ in range(2):  # the second load uses the cache of compiled files, if the engine has one
        engine.prepare(loaded.artifact, options, lambda line: None)
        session = engine.load(loaded.artifact, options)
        given = loaded.inputs(2)
        np.testing.assert_allclose(session.run(given)[0], loaded.reference(given)[0], rtol=1e-5, atol=1e-5)
        session.close()


@pytest.mark.parametrize("name", VENDORS)
def test_a_closed_session_refuses_runs_and_a_second_close_is_ignored(name: str, tmp_path: Path) -> None:
    pytest.importorskip(ENGINES[name].packages[0])
    source = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    session = engine_by_name(name).load(artifact_of(name, source, tmp_path), OPTIONS)
    session.close()
    session.close()
    with pytest.raises(EngineFailed):
        session.run([models.random(1, 4)])


@pytest.mark.parametrize("name", VENDORS)
def test_a_model_with_a_batch_fixed_to_one_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip(ENGINES[name].packages[0])
    proto = models.mlp("float[1,4] x) => (float[1,3] scores")
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    session = engine_by_name(name).load(artifact_of(name, source, tmp_path), OPTIONS)
    given = [models.random(1, 4)]
    np.testing.assert_allclose(session.run(given)[0], onnx_reference(proto)(given)[0], rtol=1e-5, atol=1e-5)
    session.close()


@pytest.mark.parametrize("name", ["null", *VENDORS])
@pytest.mark.parametrize("data", [b"", b"garbage", bytes(4096), b"<?xml version='1.0'?><net/>"])
def test_a_file_that_is_not_an_artifact_raises_engine_failed(name: str, data: bytes, tmp_path: Path) -> None:
    if name != "null":
        pytest.importorskip(ENGINES[name].packages[0])
    path = tmp_path / {"openvino": "model.xml", "tflite": "model.tflite"}.get(name, "model.onnx")
    path.write_bytes(data)
    for file in (path, tmp_path / "missing"):
        with pytest.raises(EngineFailed):
            engine_by_name(name).load(LocalArtifact(name, file, (SUM_IN,), (SUM_OUT,), "0"), OPTIONS)


def test_openvino_runs_a_model_whose_output_shape_it_learns_only_in_a_run(tmp_path: Path) -> None:
    """A detector with its own NMS gives a fixed number of boxes, by computations that OpenVINO does not foresee."""
    pytest.importorskip("openvino")
    body = """s = Squeeze(x, first) p = Greater(s, zero) i = NonZero(p) j = Squeeze(i, first) v = Gather(s, j)
        n = Shape(v) k = Min(n, two) t, at = TopK(v, k) y = Unsqueeze(t, first)"""
    constants = {"zero": np.float32(0), "first": np.array([0]), "two": np.array([2])}
    proto = models.model("float[1,6] x) => (float[1,2] y", body, {k: np.asarray(v) for k, v in constants.items()})
    path = models.write(proto, tmp_path / "m.onnx")
    inputs, outputs = (TensorSpec("x", "FP32", (1, 6)),), (TensorSpec("y", "FP32", (1, 2)),)
    session = engine_by_name("openvino").load(LocalArtifact("openvino", path, inputs, outputs, "0"), OPTIONS)
    for scale in (1, 2):
        values = np.array([[3, -1, 2, 1, -2, 4]], np.float32) * scale
        np.testing.assert_array_equal(session.run([values])[0], [[4 * scale, 3 * scale]])
    with pytest.raises(EngineFailed, match=r"output 'y' the shape \[1, 1\] instead of \[1, 2\]"):
        session.run([np.array([[3, -1, -2, -1, -2, -4]], np.float32)])
    session.close()


def test_openvino_refuses_an_open_axis_in_an_output_whose_shape_it_learns_only_in_a_run(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    body = "p = Greater(x, zero) i = NonZero(p) t = Transpose(i) v = GatherND(x, t) y = Unsqueeze(v, first)"
    constants = {"zero": np.asarray(np.float32(0)), "first": np.array([0])}
    path = models.write(models.model("float[1,n] x) => (float[1,m] y", body, constants), tmp_path / "m.onnx")
    buckets = Buckets("x:1", (4, 8), (PaddedInput("x", 1),))
    inputs, outputs = (TensorSpec("x", "FP32", (1, -1)),), (TensorSpec("y", "FP32", (1, -1)),)
    session = engine_by_name("openvino").load(LocalArtifact("openvino", path, inputs, outputs, "0", buckets), OPTIONS)
    with pytest.raises(EngineFailed, match=r"shape of output 'y' only after a run.* build without --buckets"):
        session.run([np.ones((1, 4), np.float32)])


def test_an_artifact_with_other_tensors_than_the_contract_is_refused(tmp_path: Path) -> None:
    path = models.write(models.mlp(), tmp_path / "m.onnx")
    with pytest.raises(EngineFailed, match="no output y"):
        engine_by_name("onnxruntime").load(LocalArtifact("onnxruntime", path, (SUM_IN,), (SUM_OUT,), "0"), OPTIONS)


@pytest.mark.parametrize("name", ENGINES)
def test_the_table_of_engines_marks_each_engine_that_has_a_prepare_step(name: str) -> None:
    assert (type(engine_by_name(name)).prepare is not Engine.prepare) == ENGINES[name].prepares


@pytest.mark.parametrize("name", VENDORS)
def test_products_of_large_int8_values_do_not_saturate(name: str, tmp_path: Path) -> None:
    """x86 without VNNI adds two products in 16 bits, but 2 x 255 x 127 needs more bits."""
    pytest.importorskip(ENGINES[name].packages[0])
    weights = {"w1": np.ones((16, 32), np.float32), "w2": np.ones((32, 8), np.float32)}
    body = "h = MatMul(x, w1) r = Relu(h) y = MatMul(r, w2)"
    proto = models.model("float[N,16] x) => (float[N,8] y", body, weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    given = np.abs(models.random(64, 16))
    spec = BuildSpec(name, "int8", load_profile("this-machine"))
    built = builder_for(name).build(spec, source, CalibrationSet({"x": given}, None), tmp_path, lambda line: None)
    session = engine_by_name(name).load(LocalArtifact(name, built.path, source.inputs, source.outputs, "a"), OPTIONS)
    (answers,) = session.run([given])
    session.close()
    (wanted,) = onnx_reference(proto)([given])
    np.testing.assert_allclose(answers, wanted, atol=3 * float(wanted.max()) / 255)


def test_onnx_runtime_loads_a_quantized_model_whose_nodes_share_a_constant(tmp_path: Path) -> None:
    """For exact products, ONNX Runtime converts a constant again for each node that reads it, and then fails."""
    quantized = "{0}q = QuantizeLinear({0}, {0}s, {0}z) {0}d = DequantizeLinear({0}q, {0}s, {0}z) "
    proto = models.model(
        "float[N,4] x) => (float[N,4] yd",
        "hd = DequantizeLinear(h, hs, hz) wd = DequantizeLinear(w, ws, wz) "
        + quantized.format("x")
        + "a = Add(xd, hd) "
        + quantized.format("a")
        + "b = MatMul(ad, wd) "
        + quantized.format("b")
        + "y = Add(bd, hd) "
        + quantized.format("y"),
        {
            **{f"{name}s": np.float32(0.25) for name in "xaby"},
            **{f"{name}s": np.float32(1 / 127) for name in "hw"},
            **{f"{name}z": np.int8(0) for name in "xabyhw"},
            "h": np.int8(127),
            "w": np.eye(4, dtype=np.int8) * np.int8(127),
        },
    )
    specs = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("yd", "FP32", (-1, 4))
    artifact = LocalArtifact("onnxruntime", models.write(proto, tmp_path / "m.onnx"), specs[:1], specs[1:], "0")
    session = engine_by_name("onnxruntime").load(artifact, OPTIONS)
    (answer,) = session.run([np.ones((1, 4), np.float32)])
    np.testing.assert_allclose(answer, np.full((1, 4), 3.0))


def test_only_the_engines_for_tests_need_no_package() -> None:
    assert FOR_TESTS == ("null", "fault")


WITHOUT_SDKS = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
sys.path[:] = {path!r}
from pathlib import Path
from edgert.engines import ENGINES, FOR_TESTS, EngineOptions, LocalArtifact, engine_by_name
from edgert.errors import EngineMissing
for name in ENGINES:
    engine = engine_by_name(name)  # every engine can be named without its SDK
    artifact = LocalArtifact(name, Path("nothing"), (), (), "0")
    for call in (engine.version, lambda: engine.load(artifact, EngineOptions())):
        try:
            call()
        except EngineMissing as error:
            print(name, "|", error.message)
        except Exception as error:
            assert name in FOR_TESTS, (name, error)
"""


def test_a_missing_sdk_is_one_clear_error_that_names_what_to_install() -> None:
    blocked = [*(package for kind in ENGINES.values() for package in kind.packages), "cuda", "pycuda"]
    program = WITHOUT_SDKS.format(blocked=blocked, path=sys.path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for name in set(ENGINES) - set(FOR_TESTS):
        mine = [line for line in lines if line.startswith(f"{name} |")]
        assert len(mine) == 2, lines
        assert all(f"pip install 'edgert[{name}]'" in line for line in mine)


def test_no_sdk_writes_files_of_usage_reporting_into_the_home_folder(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from edgert.engines import ENGINES, engine_by_name
for name in ("onnxruntime", "openvino"):
    engine_by_name(name).version()
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"HOME": str(tmp_path)}, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_engines_imports_no_sdk() -> None:
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from edgert.engines import ENGINES, engine_by_name
for name in ENGINES:
    engine_by_name(name)
loaded = [sdk for sdk in ("onnxruntime", "openvino", "ai_edge_litert", "tensorrt", "cuda") if sdk in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_session_gives_back_the_memory_of_a_large_run_at_rest(tmp_path: Path) -> None:
    body = "a = Relu(x) b = Sigmoid(a) y = Neg(b)"
    path = models.write(models.model("float[N,256,256] x) => (float[N,256,256] y", body), tmp_path / "model.onnx")
    specs = ((TensorSpec("x", "FP32", (-1, 256, 256)),), (TensorSpec("y", "FP32", (-1, 256, 256)),))
    session = engine_by_name("onnxruntime").load(LocalArtifact("onnxruntime", path, *specs, "0"), OPTIONS)

    def after(use: Callable[[list[Any]], object], tensors: list[Any]) -> float:
        use(tensors)
        used_mb = process_mb(os.getpid())
        assert used_mb is not None
        return used_mb

    one = models.random(1, 256, 256)
    small_mb, large_mb = after(session.run, [one]), after(session.run, [np.zeros((256, 256, 256), np.float32)])
    assert large_mb > small_mb + 60
    assert after(session.release_memory, [one]) < small_mb + 0.3 * (large_mb - small_mb)
    session.close()


def test_versions_are_remembered_until_another_package_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, kept = tmp_path / "site-packages", tmp_path / "engines.json"
    packages.mkdir()
    monkeypatch.syspath_prepend(str(packages))
    found = engine_versions(kept)
    assert found == {name: _version(name) for name in ENGINES}
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from edgert.engines.sdk_versions import engine_versions
assert engine_versions(Path({str(kept)!r})) == {found!r}
loaded = [sdk for sdk in ("onnxruntime", "openvino", "ai_edge_litert") if sdk in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    kept.write_text(kept.read_text().replace(f'"{found["null"]}"', '"of long ago"'))
    assert engine_versions(kept)["null"] == "of long ago"
    (packages / "another").mkdir()
    assert engine_versions(kept) == found
    kept.write_text("[[")
    assert engine_versions(kept) == found


def _version(name: str) -> str | None:
    try:
        return engine_by_name(name).version()
    except EngineMissing:
        return None


def test_the_error_about_an_unknown_engine_lists_the_known_engines() -> None:
    with pytest.raises(ConfigInvalid, match=r"caffe.*onnxruntime"):
        engine_by_name("caffe")


def test_the_chosen_bucket_holds_the_batch() -> None:
    assert [bucket_for(n, (1, 2, 4, 8)) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 9]


def test_a_tensorrt_plan_is_kept_for_one_artifact_version_gpu_and_batch() -> None:
    names = {
        plan_name(sha256, version, capability, batch)
        for sha256 in ("a" * 64, "b" * 64)
        for version in ("10.3.0", "11.0.0")
        for capability in ("8.7", "11.0")
        for batch in (8, 32)
    }
    assert len(names) == 16
    assert all("/" not in name and len(name) < 128 for name in names)


def test_the_model_that_onnx_runtime_runs_before_forks_is_valid() -> None:
    """The fork server ignores a model that ONNX Runtime rejects, so only this test detects one."""
    import onnx

    from edgert.engines.onnxruntime import IDENTITY

    onnx.checker.check_model(onnx.load_from_string(IDENTITY), full_check=True)
    engine_by_name("onnxruntime").before_fork()
