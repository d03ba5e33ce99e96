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


def yolox(size: int = 320, sides: tuple[int, int] = (60, 250), images: int = 6) -> tuple[Array, Array]:
    """YOLOX's output `[N, A, 5 + C]`, not decoded and decoded: three objects an image, six boxes for each.

    `sides` are the smallest and the largest side of an object, in pixels.
    """
    random = np.random.default_rng(7)
    cells = np.concatenate([np.mgrid[: size // s, : size // s][::-1].reshape(2, -1).T for s in (8, 16, 32)])
    strides = np.repeat([8, 16, 32], [(size // s) ** 2 for s in (8, 16, 32)])[:, None]
    count = (images, len(cells))
    centres = random.normal((cells + 0.5) * strides, 0.3 * strides, (*count, 2))
    smallest, largest = np.log(sides[0]), np.log(sides[1])
    lengths = np.exp(random.uniform(smallest, largest, (*count, 2)))
    scores = random.uniform(0, 0.02, (*count, 4))
    for image in range(images):
        for _ in range(3):
            centre = random.uniform(0.2 * size, 0.8 * size, 2)
            own = np.exp(random.uniform(smallest, largest, 2))
            near = np.argsort((np.abs((cells + 0.5) * strides - centre) / strides).sum(axis=1))[:6]
            centres[image, near], lengths[image, near] = centre, own * random.uniform(0.9, 1.1, (6, 2))
            scores[image, near, 0] = scores[image, near, random.integers(1, 4)] = random.uniform(0.6, 0.95)
    raw = np.concatenate([centres / strides - cells, np.log(lengths / strides), scores], 2)
    return raw.astype(np.float32), np.concatenate([centres, lengths, scores], 2).astype(np.float32)


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
