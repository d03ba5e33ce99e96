"""The share of an artifact's multiply-accumulates that run in INT8."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.builders.artifact_layers import ArtifactLayer, int8_share, product


def test_the_share_counts_multiply_accumulates_and_not_layers() -> None:
    layers = [ArtifactLayer("Conv", "fp32", 900), ArtifactLayer("Gemm", "int8", 100), ArtifactLayer("Relu", "int8")]
    assert int8_share(layers) == 0.1


def test_an_unknown_layer_makes_the_share_unknown() -> None:
    assert int8_share([ArtifactLayer("Conv", "int8", 900), ArtifactLayer("Conv", "int8", None)]) is None


def test_a_model_without_weights_has_no_share() -> None:
    assert int8_share([ArtifactLayer("Relu", "fp32")]) is None


def test_an_open_axis_has_the_length_1() -> None:
    assert product([-1, 3, 4], [2]) == 24
    assert product([3], None) is None


@pytest.mark.parametrize(
    ("share", "kind"), [(1.0, "int8"), (0.9, "int8"), (0.899, "mixed"), (0.0, "mixed"), (None, "int8")]
)
def test_an_artifact_is_called_int8_from_nine_tenths_of_the_work_in_int8(share: float | None, kind: str) -> None:
    artifact = Artifact("tflite", "int8", Path("model.tflite"), (), "tflite", {}, int8_share=share)
    assert artifact.kind == kind
    assert dataclasses.replace(artifact, float_layers=("a",)).kind == "mixed"
    assert dataclasses.replace(artifact, precision="fp32").kind == "fp32"
