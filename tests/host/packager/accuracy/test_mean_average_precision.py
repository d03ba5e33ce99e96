"""Mean average precision, on boxes whose precision is known."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.rules import Detect
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.accuracy_gate import Limits
from edgert_deploy.packager.accuracy.metrics import metric_for
from tests.support.models.metrics import reference_to, result_of, worst


def test_the_precision_of_a_detector_equals_that_of_coco() -> None:
    pytest.importorskip("pycocotools")
    spec = TensorSpec("boxes", "FP32", (-1, 2, 6))  # corners and the scores of two classes
    truth = np.full((3, 2, 5), -1, np.float32)
    truth[:, 0] = [0, 10, 10, 40, 40]
    truth[:2, 1] = [1, 60, 60, 90, 90]
    answers = np.zeros((3, 2, 6), np.float32)
    answers[:, 0] = [10, 10, 40, 40, 0.9, 0]
    answers[:2, 1] = [60, 60, 90, 90, 0, 0.8]
    rule = Detect("boxes", form="anchors_first", box_format="xyxy", labels=("cat", "dog"))
    reference = reference_to(
        (spec,), [answers], boxes=truth, detect=rule, image_size=(100, 100), class_names=("cat", "dog")
    )
    exact = result_of(reference, [answers])
    assert (exact.accuracy.metric, exact.accuracy.fp32, exact.accuracy.artifact) == ("map", 1.0, 1.0)
    worse = answers.copy()
    worse[1, 1, 4:] = 0  # one of two dogs is missed, so the average precision of the class is 0.5
    found = result_of(reference, [worse], Limits(0.1))
    assert found.accuracy.artifact == pytest.approx(0.75, abs=0.01)
    assert not found.passed
    dog = worst(found, "class")
    assert (dog.name, dog.samples) == ("dog", 2)
    with pytest.raises(CalibrationInvalid, match="array `boxes`"):
        metric_for("map", reference_to((spec,), [answers], detect=rule, image_size=(100, 100)))
    with pytest.raises(ConfigInvalid, match="--postprocess"):
        metric_for("map", reference_to((spec,), [answers], boxes=truth))
