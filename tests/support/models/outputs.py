"""Outputs as FP32 answers them, and the judgements of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.decisions import judgements
from edgert_deploy.packager.accuracy.judgement import Judgement
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.samples.samples import CalibrationSet

Array = NDArray[Any]
RANDOM = np.random.default_rng(3)


def judged(*outputs: Array, inputs: Sequence[tuple[int, ...]] = (), **rules: Any) -> tuple[Judgement, ...]:
    specs = tuple(TensorSpec(f"out{i}", "FP32", (-1, *array.shape[1:])) for i, array in enumerate(outputs))
    samples = {f"in{i}": np.zeros((len(outputs[0]), *shape), np.float32) for i, shape in enumerate(inputs)}
    return judgements(Reference(specs, list(outputs), CalibrationSet(samples, None), **rules))


def softmax(logits: Array) -> Array:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True), np.float32)


def yolo(images: int = 6, classes: int = 18, anchors: int = 2100) -> Array:
    """A detector's output `[N, 4 + C, A]`: three objects an image, coordinates to 320, scores to 1."""
    boxes = np.concatenate(
        [RANDOM.uniform(40, 280, (images, 2, anchors)), RANDOM.uniform(20, 60, (images, 2, anchors))], 1
    )
    scores = RANDOM.uniform(0, 0.02, (images, classes, anchors))
    for image in range(images):
        for anchor in RANDOM.choice(anchors, 3, replace=False):
            scores[image, RANDOM.integers(classes), anchor] = RANDOM.uniform(0.4, 0.9)
    return np.asarray(np.concatenate([boxes, scores], 1), np.float32)
