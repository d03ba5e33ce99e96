"""Sensitivity: the noise of each layer alone in INT8, and the order of the layers by this noise."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.accuracy.metrics import SQNR_DB_MAX
from edgert_deploy.packager.accuracy.sensitivity import Harm, Sensitivity, worst_first
from edgert_deploy.packager.builders import builder_for
from edgert_deploy.packager.builders.layers import Layer, layers_of
from edgert_deploy.packager.builders.qdq import prepared


def test_every_layer_of_the_example_does_some_harm_and_a_second_measurement_is_equal(
    digits_source: Any, digits_calibration: Any
) -> None:
    proto = prepared(digits_source)
    recipe = builder_for("onnxruntime").recipe(digits_source, load_profile("this-machine"))
    sensitivity = Sensitivity(proto, digits_calibration, recipe)
    layers = layers_of(proto)
    harms = [sensitivity.of(layer) for layer in layers]
    assert all(0 < harm.sqnr_db <= SQNR_DB_MAX for harm in harms)
    assert min(harm.sqnr_db for harm in harms) < 60
    assert sensitivity.of(layers[0]) == harms[0]


def test_a_model_that_the_tools_cannot_run_fails_the_build(digits_source: Any, digits_calibration: Any) -> None:
    proto = prepared(digits_source)
    recipe = builder_for("onnxruntime").recipe(digits_source, load_profile("this-machine"))
    layer = layers_of(proto)[0]
    del proto.graph.initializer[:]
    with pytest.raises(BuildFailed, match=r"harm of quantizing .* --precision fp16 or fp32"):
        Sensitivity(proto, digits_calibration, recipe).of(layer)


def test_the_most_harmful_layer_comes_first_and_harmless_layers_are_left_out() -> None:
    layers = [Layer(name, "Conv", (name,), (name,)) for name in "abcd"]
    harms = [Harm(layer, db) for layer, db in zip(layers, (30.0, 10.0, SQNR_DB_MAX, 30.0), strict=True)]
    assert [layer.name for layer in worst_first(harms)] == ["b", "a", "d"]
