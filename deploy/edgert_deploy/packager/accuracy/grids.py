"""Recognize and judge a detector's grids of cells.

Each cell has one or more anchors, and each anchor has an objectness, a box and the scores of classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgert_deploy.packager.accuracy.fp32_agreement import SCORE_MIN, Array, Outputs, cell_agreement
from edgert_deploy.packager.accuracy.judgement import CLASSES_MAX, Judgement, within_0_and_1

ANCHORS_MIN = 100  # an output with fewer anchors is not treated as a detector's output
CONFIDENT_CELLS_MAX = 0.25  # an output is a detector's grid only if at most this share of its cells has an object
CELL_ANCHORS = (3, 5)  # the numbers of anchors of a cell: of YOLOv3 to YOLOv7, and of YOLOv2
BACKGROUND_LOGIT = -2.0  # the objectness of a cell without an object is below this logit


class Grid(NamedTuple):
    """The layout of a detector's grid.

    Attributes:
        axis: The axis of the channels.
        objectness: The channel of the objectness.
        anchors: The number of anchors whose channels follow each other on `axis`.
        logits: Whether the objectness and the classes are before the sigmoid.
    """

    axis: int
    objectness: int
    anchors: int = 1
    logits: bool = False


def grid_of(reference: Array) -> Grid | None:
    """Return the layout of a detector's grid; None for no grid.

    Each anchor of a cell has an objectness, before or after four box values, and then the classes. Maps of one kind of
    value, such as masks, depths, images and features, do not mix scores with other values in this order. Logits of
    classes over positions look like logits of a grid, so logits count only in a shape with an axis of anchors.
    """
    if reference.dtype.kind != "f":
        return None
    return next((layout for layout in _layouts(reference.shape) if _is_grid(reference, layout)), None)


def may_be_grid_of_logits(reference: Array) -> bool:
    """Return whether an output may be a detector's grid of logits; logits of classes may look the same."""
    if reference.dtype.kind != "f" or reference.ndim != 4:
        return False
    layouts = [layout._replace(logits=True) for layout in _layouts(reference.shape) if layout.objectness == 4]
    return any(_is_grid(reference, layout) for layout in layouts)


def of_cells(i: int, output: str, layout: Grid) -> Judgement:
    """Return the judgement of the cells in output `i`, whose name is `output`."""

    def score(answers: Outputs, reference: Outputs) -> float:
        return cell_agreement(*_cell_parts(answers[i], layout), *_cell_parts(reference[i], layout))

    return Judgement("cells", (output,), score)


def boxes_and_scores(cells: Array, objectness: int) -> tuple[Array, Array]:
    """Return the box values `[N, A, 4]` and the scores `[N, A, C]` of cells or anchors with an objectness."""
    boxes = cells[..., :4] if objectness == 4 else cells[..., 1:5]
    return boxes, cells[..., 5:] * cells[..., objectness, None]


def sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits.clip(-80, 80))))


def _layouts(shape: tuple[int, ...]) -> list[Grid]:
    if len(shape) == 4:
        found = [Grid(axis, objectness) for axis in (1, 3) for objectness in (0, 4)]
        found += [Grid(axis, 4, anchors) for axis in (1, 3) for anchors in CELL_ANCHORS]
        return [layout for layout in found if shape[layout.axis] % layout.anchors == 0]
    if len(shape) == 5 and (shape[1] in CELL_ANCHORS or shape[3] in CELL_ANCHORS):
        return [Grid(4, 4), Grid(4, 4, logits=True)]
    return []


def _is_grid(reference: Array, layout: Grid) -> bool:
    cells = _cells(reference, layout)
    if cells.shape[1] < ANCHORS_MIN or not 6 <= cells.shape[2] <= CLASSES_MAX:
        return False
    if layout.logits:
        low = (cells[..., :5] < BACKGROUND_LOGIT).mean(axis=(0, 1))  # in logits of classes, the first four are low, too
        if float(low[:4].max()) > 0.5 or float(low[4]) < 1 - CONFIDENT_CELLS_MAX:
            return False
    elif not (within_0_and_1(cells[..., layout.objectness]) and within_0_and_1(cells[..., 5:])):
        return False  # before the product, because maps may be large
    boxes, scores = _cell_parts(reference, layout)
    confident = float((scores.max(axis=2) >= SCORE_MIN).mean())
    if not 0 < confident <= CONFIDENT_CELLS_MAX:
        return False
    return not any(within_0_and_1(boxes[:, anchor :: layout.anchors]) for anchor in range(layout.anchors))


def _cells(grid: Array, layout: Grid) -> Array:
    """Return the cells `[N, cells, channels]` of a grid, one after the other for each anchor of a cell."""
    return np.moveaxis(grid, layout.axis, -1).reshape(len(grid), -1, grid.shape[layout.axis] // layout.anchors)


def _cell_parts(grid: Array, layout: Grid) -> tuple[Array, Array]:
    cells = _cells(grid, layout)
    if layout.logits:
        cells = np.concatenate([cells[..., :4], sigmoid(cells[..., 4:])], axis=2)
    return boxes_and_scores(cells, layout.objectness)
