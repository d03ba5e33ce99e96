"""ONNX Runtime's artifacts: one recipe for x86, one for ARM."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import builder_for
from edgert_deploy.packager.sources.source_model import SourceModel


def test_arm_gets_signed_activations_and_x86_unsigned(digits_source: SourceModel) -> None:
    def profile(*machines: str) -> DeviceProfile:
        return DeviceProfile("p", "", machines, ("onnxruntime",), "int8", "3.10", "2.31", 1, "/s")

    builder = builder_for("onnxruntime")
    recipes = {m: builder.recipe(digits_source, profile(*m)).activations for m in [("aarch64",), ("x86_64",), ()]}
    assert recipes == {("aarch64",): "int8", ("x86_64",): "uint8", (): "uint8"}
