"""Models from other tools on every engine; the artifacts also run in the bare engines, without our code.

The files come from PyTorch's exporters (tests/support/models/exported). Opsets are in test_builders.py, branches in
test_branches.py, scikit-learn in test_classical.py, buckets in test_buckets.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.engines.onnxruntime import compute_int8_exactly
from edgert.engines.openvino import exact_int8
from edgert.errors import SourceInvalid
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.nodes import PROTO_BYTES_MAX
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build
from tests.support.models.exported import FOLDER
from tests.support.paths import ROOT

Feeds = dict[str, NDArray[Any]]
PEAK_BYTES_MAX = 500 * 1024**2  # for a process that refuses 3 GB of weights; its libraries alone take 150 MB
pytestmark = pytest.mark.usefixtures("probes_are_forks")


def in_the_bare_engine(artifact: Artifact, feeds: Feeds) -> dict[str, NDArray[Any]]:
    """Answer one sample through the vendor's own interface; run TensorRT's graph in ONNX Runtime."""
    if artifact.engine == "openvino":
        import openvino

        config = {"INFERENCE_PRECISION_HINT": "f32", **exact_int8()}
        compiled = openvino.Core().compile_model(artifact.path, "CPU", config)
        answers = compiled(feeds)
        return {name: answers[output] for output in compiled.outputs for name in output.get_names()}
    if artifact.engine == "tflite":
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(model_path=str(artifact.path))
        interpreter.allocate_tensors()
        for detail in interpreter.get_input_details():
            interpreter.set_tensor(detail["index"], feeds[detail["name"]])
        interpreter.invoke()
        return {one["name"]: interpreter.get_tensor(one["index"]) for one in interpreter.get_output_details()}
    return by_onnx_runtime(artifact.path, feeds)


def by_onnx_runtime(path: Path, feeds: Feeds) -> dict[str, NDArray[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    compute_int8_exactly(options)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, feeds), strict=True))


def samples_of(source: SourceModel) -> CalibrationSet:
    return CalibrationSet(
        {spec.name: models.random(32, *spec.item_shape, seed=i) for i, spec in enumerate(source.inputs)}, None
    )


def sample(samples: CalibrationSet, row: int) -> Feeds:
    return {name: array[row : row + 1] for name, array in samples.inputs.items()}


def assert_close(got: NDArray[Any], want: NDArray[Any], precision: str) -> None:
    scale = max(1e-3, float(np.abs(want).max()))
    np.testing.assert_allclose(got, want, atol={"fp32": 1e-4, "fp16": 0.02, "int8": 0.1}[precision] * scale)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_the_artifact_contains_weights_from_a_file_beside_the_model(
    engine: str, precision: Any, tmp_path: Path
) -> None:
    shutil.copy(FOLDER / "picture.onnx", tmp_path)
    shutil.copy(FOLDER / "picture.onnx.data", tmp_path)
    source = load_source(tmp_path / "picture.onnx")
    samples = samples_of(source)
    artifact = build(engine, source, samples, precision, tmp_path / "out")
    (tmp_path / "picture.onnx.data").unlink()  # the file is not needed any more
    for row in range(4):
        feeds = sample(samples, row)
        want = by_onnx_runtime(FOLDER / "picture.onnx", feeds)["scores"]
        assert_close(in_the_bare_engine(artifact, feeds)["scores"], want, precision)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_model_in_fp16_is_built_in_fp32_from_its_weights(engine: str, precision: Any, tmp_path: Path) -> None:
    source = load_source(FOLDER / "half.onnx")
    assert {spec.datatype for spec in (*source.inputs, *source.outputs)} == {"FP32"}
    assert "computes in FP16" in source.remarks[0]
    assert [text.split()[0] for text in source.remarks[1:]] == ["'image'", "'scores'"]
    samples = samples_of(source)
    artifact = build(engine, source, samples, precision, tmp_path / "out")
    for row in range(4):
        feeds = sample(samples, row)
        want = by_onnx_runtime(FOLDER / "half.onnx", {"image": feeds["image"].astype(np.float16)})["scores"]
        got = in_the_bare_engine(artifact, feeds)["scores"]
        assert_close(got, want.astype(np.float32), "int8" if precision == "int8" else "fp16")


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_state_whose_second_axis_is_the_batch_gets_the_batch_in_front_and_the_same_answers(
    engine: str, tmp_path: Path
) -> None:
    source = load_source(FOLDER / "speech.onnx")
    assert {spec.name: spec.shape for spec in source.inputs} == {"x": (-1, 5, 6), "h": (-1, 2, 8), "c": (-1, 2, 8)}
    samples = samples_of(source)
    artifact = build(engine, source, samples, "fp32", tmp_path / "out")
    state: Feeds = {name: np.zeros((1, 2, 8), np.float32) for name in ("h", "c")}
    theirs: Feeds = {name: np.zeros((2, 1, 8), np.float32) for name in ("h", "c")}
    for row in range(4):
        x = sample(samples, row)["x"]
        got = in_the_bare_engine(artifact, {"x": x, **state})
        want = by_onnx_runtime(FOLDER / "speech.onnx", {"x": x, **theirs})
        assert_close(got["y"], want["y"], "fp32")
        state = {"h": got["h_next"], "c": got["c_next"]}
        theirs = {"h": want["h_next"], "c": want["c_next"]}
        assert_close(state["h"].transpose(1, 0, 2), theirs["h"], "fp32")


def too_large(folder: Path) -> Path:
    """A model with 3 GB of weights in a file that takes no space on the disk."""
    from onnx import TensorProto

    proto = models.model("float[N,32768] x) => (float[N,4] y", "y = MatMul (x, w)", {"w": models.random(4, 4)})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.dims[:] = [32768, 24576]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.data"), ("offset", "0"), ("length", str(3 * 1024**3))):
        tensor.external_data.add(key=key, value=value)
    with (folder / "w.data").open("wb") as file:
        file.truncate(3 * 1024**3)
    return models.write(proto, folder / "large.onnx")


def test_a_model_with_too_many_weights_is_refused_before_they_are_read(tmp_path: Path) -> None:
    path = too_large(tmp_path)
    with pytest.raises(
        SourceInvalid, match=rf"{3 * 1024**3} bytes of weights; the limit is {PROTO_BYTES_MAX} for every engine"
    ):
        load_source(path)
    program = f"""
import resource
from pathlib import Path
from edgert_deploy.packager.sources.source_model import load_source
from tests.support.needed import needed

needed("nncf")
try:
    load_source(Path({str(path)!r}))
except Exception as error:
    print(type(error).__name__)
# The ru_maxrss of a new process starts at the value of its parent.
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    name, peak = done.stdout.split()
    assert name == "SourceInvalid"
    assert int(peak) < PEAK_BYTES_MAX
