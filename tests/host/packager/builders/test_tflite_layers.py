"""The layers of a .tflite file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.builders.layers import layers_of
from edgert_deploy.packager.builders.onnx_layers import onnx_layers
from edgert_deploy.packager.builders.qdq import prepared
from edgert_deploy.packager.builders.tflite_layers import tflite_layers
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build, samples_for


@pytest.mark.parametrize("make", [models.cnn, models.mlp, models.transformer])
def test_the_layers_of_the_file_have_the_multiply_accumulates_of_the_source(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    source = load_source(models.write(make(), tmp_path / "m.onnx"))
    artifact = build("tflite", source, samples_for(source), "fp32", tmp_path / "out")
    want = sum(layer.macs or 0 for layer in onnx_layers(tmp_path / "m.onnx"))
    assert sum(layer.macs or 0 for layer in tflite_layers(artifact.path)) == want
    assert artifact.int8_share == 0.0


@pytest.mark.parametrize(
    ("signature", "body", "weights", "macs"),
    [
        ("float[1,4,5,5] x) => (float[1,4,3,3] y", "y = Conv <group = 4> (x, w)", (4, 1, 3, 3), 4 * 9 * 9),
        ("float[1,4,5,5] x) => (float[1,3,10,10] y", "y = ConvTranspose <strides = [2, 2]> (x, w)", (4, 3, 2, 2), 1200),
    ],
)
def test_each_kind_of_convolution_is_counted(
    signature: str, body: str, weights: tuple[int, ...], macs: int, tmp_path: Path
) -> None:
    proto = models.model(signature, body, {"w": models.random(*weights)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    artifact = build("tflite", source, samples_for(source), "fp32", tmp_path / "out")
    assert sum(layer.macs or 0 for layer in tflite_layers(artifact.path)) == macs


def test_layers_that_stay_in_float_reduce_the_int8_share(tmp_path: Path) -> None:
    source = load_source(models.write(models.cnn(), tmp_path / "m.onnx"))
    conv = layers_of(prepared(source))[0]
    whole = build("tflite", source, samples_for(source), "int8", tmp_path / "whole")
    partly = build("tflite", source, samples_for(source), "int8", tmp_path / "partly", (conv,))
    assert (whole.int8_share, whole.kind) == (1.0, "int8")
    assert partly.int8_share == pytest.approx(32 / (8 * 36 * 18 + 32), abs=1e-3)
