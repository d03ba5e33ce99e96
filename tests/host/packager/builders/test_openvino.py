"""OpenVINO's artifacts: an IR without notes, in which INT8 layers are found."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("nncf")

from edgert_deploy.packager.builders import builder_for
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build, samples_for


def test_the_ir_holds_the_model_and_no_notes(tmp_path: Path) -> None:
    source = load_source(models.write(models.cnn(), tmp_path / "m.onnx"))
    artifact = build("openvino", source, samples_for(source), "int8", tmp_path / "out")
    root = ElementTree.parse(artifact.path).getroot()
    assert root.get("name") == "model"
    assert root.find("rt_info") is None
    assert artifact.companions == (tmp_path / "out" / "model.bin",)
    found = _precisions(artifact.path)
    assert found["Convolution"] == found["MatMul"] == "int8"


def test_fp16_halves_the_weights_and_fp32_keeps_them(tmp_path: Path) -> None:
    source = load_source(models.write(models.cnn(), tmp_path / "m.onnx"))
    half = build("openvino", source, samples_for(source), "fp16", tmp_path / "fp16")
    full = build("openvino", source, samples_for(source), "fp32", tmp_path / "fp32")
    assert _precisions(half.path)["Convolution"] == "fp16"
    assert _precisions(full.path)["Convolution"] == "fp32"


def _precisions(path: Path) -> dict[str, str]:
    return {layer.kind: layer.precision for layer in builder_for("openvino").layers(path)}
