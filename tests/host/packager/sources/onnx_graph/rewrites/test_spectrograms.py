"""STFTs become convolutions, which every engine supports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build

onnx: Any = pytest.importorskip("onnx")
LENGTH, FRAME, STEP = 400, 64, 24
WINDOW = np.hanning(FRAME).astype(np.float32)


def spectrogram(
    *, one_sided: int | None = 1, window: bool = True, length: bool = True, channels: int = 1, unsqueezed: bool = True
) -> Any:
    """Return a model like an export of torch.stft: from [N, 400] to [N, frames, bins, 2]."""
    helper, value, numpy = onnx.helper, onnx.helper.make_tensor_value_info, onnx.numpy_helper
    inputs = ["signal", "step", "window" if window else "", *(["length"] if length else [])]
    given = {
        "axis": np.array([-1], np.int64),
        "step": np.array(STEP, np.int64),
        "window": WINDOW,
        "length": np.array(FRAME, np.int64),
    }
    nodes = [helper.make_node("STFT", inputs, ["y"], **({} if one_sided is None else {"onesided": one_sided}))]
    if channels == 1:
        unsqueeze = helper.make_node("Unsqueeze", ["x", "axis"], ["signal"])
        nodes.insert(0, unsqueeze if unsqueezed else helper.make_node("Identity", ["x"], ["signal"]))
    x = value("x" if channels == 1 else "signal", 1, ["N", LENGTH] if channels == 1 else ["N", LENGTH, channels])
    constants = [numpy.from_array(array, name) for name, array in given.items()]
    graph = helper.make_graph(nodes, "g", [x], [value("y", 1, ["N", None, None, 2])], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tflite"])
@pytest.mark.parametrize(
    "form",
    [{}, {"one_sided": 0}, {"window": False}, {"length": False}, {"unsqueezed": False}],
    ids=["torch", "both-sides", "boxcar", "no-length", "two-axes"],
)
def test_each_engine_computes_a_spectrogram(tmp_path: Path, engine: str, form: dict[str, Any]) -> None:
    source = load_source(models.write(spectrogram(**form), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(12, LENGTH)}, None)
    (answers,) = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    frames = np.lib.stride_tricks.sliding_window_view(samples.inputs["x"], FRAME, axis=1)[:, ::STEP]
    transform = np.fft.rfft if form.get("one_sided", 1) else np.fft.fft
    want = transform(frames * (WINDOW if form.get("window", True) else 1))
    np.testing.assert_allclose(answers, np.stack([want.real, want.imag], -1), atol=1e-4)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ONNX Runtime 1.23, the last for Python 3.10, may crash on it")
def test_a_spectrogram_of_a_complex_signal_stays_for_onnx_runtime(tmp_path: Path) -> None:
    source = load_source(models.write(spectrogram(one_sided=0, channels=2), tmp_path / "m.onnx"))
    assert [node.op_type for node in source.proto.graph.node] == ["STFT"]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tflite"])
def test_a_spectrogram_is_one_sided_by_default(tmp_path: Path, engine: str) -> None:
    """By default, ONNX's shape inference assumes two sides, so the next layer seemed not to fit."""
    proto = spectrogram(one_sided=None)
    helper, bands = onnx.helper, models.random(FRAME // 2 + 1, 8)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(bands, "bands"))
    proto.graph.node.append(helper.make_node("ReduceSumSquare", ["y"], ["power"], axes=[3], keepdims=0))
    proto.graph.node.append(helper.make_node("MatMul", ["power", "bands"], ["out"]))
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("out", 1, ["N", None, 8]))
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(12, LENGTH)}, None)
    (answers,) = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    frames = np.lib.stride_tricks.sliding_window_view(samples.inputs["x"], FRAME, axis=1)[:, ::STEP]
    want = np.abs(np.fft.rfft(frames * WINDOW)) ** 2 @ bands
    np.testing.assert_allclose(answers, want, atol=1e-3 * np.abs(want).max())
