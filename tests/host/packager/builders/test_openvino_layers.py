"""The layers of an OpenVINO IR."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert_deploy.packager.builders.artifact_layers import int8_share
from edgert_deploy.packager.builders.layers import layers_of
from edgert_deploy.packager.builders.onnx_layers import onnx_layers
from edgert_deploy.packager.builders.openvino_layers import openvino_layers
from edgert_deploy.packager.builders.qdq import prepared
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build, samples_for
from tests.support.needed import needed

needed("openvino")
needed("nncf")


@pytest.mark.parametrize("make", [models.cnn, models.mlp, models.transformer])
def test_the_layers_of_the_ir_have_the_multiply_accumulates_of_the_source(make: object, tmp_path: Path) -> None:
    assert callable(make)
    source = load_source(models.write(make(), tmp_path / "m.onnx"))
    artifact = build("openvino", source, samples_for(source), "fp32", tmp_path / "out")
    want = sum(layer.macs or 0 for layer in onnx_layers(tmp_path / "m.onnx"))
    assert sum(layer.macs or 0 for layer in openvino_layers(artifact.path)) == want
    assert artifact.int8_share == 0.0


def test_layers_that_stay_in_float_do_not_count_in_the_int8_share(tmp_path: Path) -> None:
    source = load_source(models.write(models.cnn(), tmp_path / "m.onnx"))
    conv = layers_of(prepared(source))[0]
    whole = build("openvino", source, samples_for(source), "int8", tmp_path / "whole")
    partly = build("openvino", source, samples_for(source), "int8", tmp_path / "partly", (conv,))
    assert whole.int8_share == 1.0
    assert partly.int8_share == pytest.approx(32 / (8 * 36 * 18 + 32), abs=1e-3)
    assert int8_share(openvino_layers(partly.path)) == pytest.approx(32 / (8 * 36 * 18 + 32))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="OpenVINO computes in INT8 on x86 processors")
def test_a_depthwise_convolution_runs_in_int8(tmp_path: Path) -> None:
    import openvino

    body = """
        a = Conv(x, w0) b = Relu(a)
        c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 16> (b, w1)
        d = Relu(c) y = Conv(d, w0)
    """
    weights = {"w0": models.random(16, 16, 1, 1), "w1": models.random(16, 1, 3, 3)}
    proto = models.model("float[1,16,8,8] x) => (float[1,16,8,8] y", body, weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    artifact = build("openvino", source, samples_for(source), "int8", tmp_path / "out")
    assert artifact.int8_share == 1.0
    compiled = openvino.Core().compile_model(str(artifact.path), "CPU")
    notes = [one.get_rt_info() for one in compiled.get_runtime_model().get_ops()]
    convolutions = [one for one in notes if one["layerType"].astype(str) == "Convolution"]
    assert len(convolutions) == 3
    assert {one["runtimePrecision"].astype(str) for one in convolutions} <= {"u8", "i8"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="OpenVINO computes in INT8 on x86 processors")
def test_a_graph_whose_activations_were_quantized_with_a_zero_point_runs_in_int8(tmp_path: Path) -> None:
    """ONNX Runtime's quantizer writes such a graph. Earlier code reported 0 % of the work in INT8."""
    import openvino

    body = """
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) w = DequantizeLinear(w8, s, w0)
        a = Conv <kernel_shape = [1, 1]> (d, w)
        p = QuantizeLinear(a, s, z) e = DequantizeLinear(p, s, z) y = Conv <kernel_shape = [1, 1]> (e, w)
    """
    w8 = np.random.default_rng(0).integers(-127, 128, (16, 16, 1, 1)).astype(np.int8)
    weights: dict[str, Any] = {"s": np.float32(0.03), "z": np.uint8(117), "w8": w8, "w0": np.int8(0)}
    proto = models.model("float[1,16,8,8] x) => (float[1,16,8,8] y", body, weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert source.quantized
    artifact = build("openvino", source, samples_for(source), "int8", tmp_path / "out")
    assert artifact.int8_share == 1.0
    compiled = openvino.Core().compile_model(str(artifact.path), "CPU")
    notes = [one.get_rt_info() for one in compiled.get_runtime_model().get_ops()]
    convolutions = [one for one in notes if one["layerType"].astype(str) == "Convolution"]
    assert {one["runtimePrecision"].astype(str) for one in convolutions} <= {"u8", "i8"}
