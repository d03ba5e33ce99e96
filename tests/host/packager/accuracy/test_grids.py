"""A detector's grid of cells is recognized and judged by its objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.models.outputs import judged, softmax

Array = NDArray[Any]
RANDOM = np.random.default_rng(3)


def grid(objectness: int = 0, classes: int = 8, images: int = 6, side: int = 16) -> Array:
    """A detector's grid `[N, 5 + C, side, side]`: an objectness, four box values and classes, with five objects."""
    boxes = RANDOM.normal(0, 1, (images, 4, side, side))
    scores = softmax(RANDOM.normal(0, 4, (images, side, side, classes))).transpose(0, 3, 1, 2)
    found = RANDOM.uniform(0, 0.02, (images, 1, side, side))
    found[:, 0, 3, 3:8], scores[:, :, 3, 3:8], scores[:, 2, 3, 3:8] = 0.8, 0.01, 0.9
    front = [found, boxes] if objectness == 0 else [boxes, found]
    answer: Array = np.concatenate([*front, scores], 1)
    return answer.astype(np.float32)


@pytest.mark.parametrize("axis", [1, 3])
@pytest.mark.parametrize("objectness", [0, 4])
def test_a_grid_of_cells_is_judged_by_its_objects_their_classes_and_their_boxes(axis: int, objectness: int) -> None:
    """R squared hides lost objects, because most cells have none."""
    reference = grid(objectness)
    lost, renamed, moved = reference.copy(), reference.copy(), reference.copy()
    lost[:, objectness, 3, 3] = 0.1
    renamed[:, [7, 8], 3, 3] = renamed[:, [8, 7], 3, 3]
    moved[:, 1 if objectness == 0 else 0, 3] += 1
    reference, lost, renamed, moved = (np.moveaxis(each, 1, axis) for each in (reference, lost, renamed, moved))
    (judgement,) = judged(reference, inputs=[(3, 128, 128)])
    assert (judgement.name, judgement.score([reference], [reference])) == ("cells", 1.0)
    assert judgement.score([lost], [reference]) == pytest.approx(8 / 9)
    assert judgement.score([renamed], [reference]) == pytest.approx(4 / 5)
    assert judgement.score([moved], [reference]) < 0.5
    assert judgement.score([np.full_like(reference, np.nan)], [reference]) == 0.0


def logit(scores: Array) -> Array:
    clipped = scores.clip(1e-4, 1 - 1e-4)
    return np.asarray(np.log(clipped / (1 - clipped)), np.float32)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_a_grid_with_several_anchors_in_each_cell_is_judged_by_its_objects(
    joined: bool, channels_last: bool, logits: bool
) -> None:
    """YOLOv3 and YOLOv5 write three anchors for each cell. Here the second one has the objects."""
    empty = grid(4)
    empty[:, 4] = 0.01
    reference = np.stack([empty, grid(4), empty], 1)  # [N, A, 5 + C, H, W]
    lost = reference.copy()
    lost[:, 1, 4, 3, 3] = 0.01
    outputs = []
    for each in (lost, reference):
        array = np.concatenate([each[:, :, :4], logit(each[:, :, 4:])], 2) if logits else each
        if joined:
            array = array.reshape(len(array), -1, *array.shape[3:])
            outputs.append(np.moveaxis(array, 1, 3) if channels_last else array)
        else:
            outputs.append(array.transpose(0, 3, 4, 1, 2) if channels_last else np.moveaxis(array, 2, 4))
    answers, expected = outputs
    (judgement,) = judged(expected, inputs=[(3, 128, 128)])
    if joined and logits:  # such a grid looks like logits of classes
        assert judgement.name == "values"
        return
    assert (judgement.name, judgement.score([expected], [expected])) == ("cells", 1.0)
    assert judgement.score([answers], [expected]) == pytest.approx(8 / 9)
    assert judgement.score([np.full_like(expected, np.nan)], [expected]) == 0.0


NO_GRIDS = {
    "maps": [softmax(RANDOM.normal(0, 3, (6, 16, 16, 12))), RANDOM.uniform(0, 1, (6, 12, 16, 16)) ** 4],
    "values": [
        RANDOM.normal(0, 3, (6, 12, 16, 16)),  # classes of each position before a softmax
        RANDOM.normal(0, 3, (6, 12, 16, 16)).clip(0),  # features
        RANDOM.normal(0, 1, (6, 12, 16, 16)).clip(0, 6) * 0.9,
        RANDOM.uniform(0, 9, (6, 1, 16, 16)),  # a depth
        RANDOM.normal(0, 1, (6, 3, 32, 32)),  # an image
        grid()[:, :5],  # no classes
    ],
}


def test_maps_images_and_features_are_no_grids_of_a_detector() -> None:
    for name, outputs in NO_GRIDS.items():
        for output in outputs:
            reference = output.astype(np.float32)
            assert judged(reference, inputs=[(3, 128, 128)])[0].name == name, reference.shape
    rare_classes = RANDOM.normal(0, 4, (6, 21, 16, 16)) - 6
    for output in (rare_classes, rare_classes.reshape(6, 3, 7, 16, 16).transpose(0, 1, 3, 4, 2)):
        assert judged(output.astype(np.float32), inputs=[(3, 128, 128)])[0].name == "values"
    assert judged(grid(), inputs=[grid().shape[1:]])[0].name == "values"  # a reconstruction of the input
    assert judged(grid(), inputs=[(100, 64)])[0].name == "values"  # no image
