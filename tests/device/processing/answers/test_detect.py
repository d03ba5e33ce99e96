"""Detections equal the results of a plain reference, in pixels of the sent image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgert.bundle.rules import Detect
from edgert.errors import EngineFailed
from edgert.processing.answers.detect import CANDIDATES_MAX, TOGETHER_MAX, detections, in_source, suppress
from edgert.processing.images.placement import Placement

SIZE = (64, 96)
Box = tuple[float, float, float, float]


def iou(a: Box, b: Box) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union else 0.0


def reference(boxes: list[Box], scores: list[list[float]], rule: Detect) -> list[tuple[Box, np.float32, int]]:
    """Return the detections of a textbook algorithm: one box at a time, in plain Python."""
    found = []
    for box, row in zip(boxes, scores, strict=True):
        best = max(range(len(row)), key=lambda c: row[c])
        if row[best] >= rule.score_threshold:
            found.append((box, np.float32(row[best]), best))
    found.sort(key=lambda one: -one[1])
    kept: list[tuple[Box, np.float32, int]] = []
    for one in found:
        if not any(one[2] == other[2] and iou(one[0], other[0]) > rule.iou_threshold for other in kept):
            kept.append(one)
    return kept[: rule.detections_max]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Box], list[list[float]]]:
    """Boxes with whole corners make all overlaps exact. Scores in 32nds make ties happen."""
    count, classes = draw(st.integers(1, 14)), draw(st.integers(1, 3))
    boxes: list[Box] = []
    for _ in range(count):
        left, top = draw(st.integers(0, 80)), draw(st.integers(0, 50))
        boxes.append((left, top, left + draw(st.integers(0, 16)), top + draw(st.integers(0, 14))))
    share = st.integers(0, 32).map(lambda n: n / 32)
    scores = [[draw(share) for _ in range(classes)] for _ in range(count)]
    return boxes, scores


@given(
    scenes(),
    st.sampled_from(["channels_first", "anchors_first"]),
    st.sampled_from(["cxcywh", "xyxy", "xywh", "yxyx"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(1, 8),
)
@settings(max_examples=300, deadline=None)
def test_the_detector_finds_the_boxes_of_a_plain_reference(
    scene: tuple[list[Box], list[list[float]]],
    form: str,
    box_format: str,
    apart: bool,
    objectness: bool,
    iou_threshold: float,
    most: int,
) -> None:
    boxes, scores = scene
    objectness = objectness and not apart
    rule = Detect(
        "b",
        "s" if apart else "",
        form=form,
        objectness=objectness,
        box_format=box_format,
        iou_threshold=iou_threshold,
        detections_max=most,
    )
    a, b, c, d = np.array(boxes, np.float32).T
    columns = {
        "cxcywh": ((a + c) / 2, (b + d) / 2, c - a, d - b),
        "xyxy": (a, b, c, d),
        "xywh": (a, b, c - a, d - b),
        "yxyx": (b, a, d, c),
    }[box_format]
    parts: list[NDArray[Any]] = [np.stack(columns, axis=1), np.array(scores, np.float32)]
    if objectness:
        parts.insert(1, np.full((len(boxes), 1), 0.5, np.float32))
        scores = [[0.5 * score for score in row] for row in scores]
    outputs = parts if apart else [np.concatenate(parts, axis=1)]
    if form == "channels_first":
        outputs = [array.T for array in outputs]
    found = detections(rule, [array[None] for array in outputs], SIZE, None)
    want = reference(boxes, scores, rule)
    count = int(found.counts[0])
    assert count == len(want)
    assert [tuple(box) for box in found.boxes[0, :count].tolist()] == [box for box, _, _ in want]
    assert found.scores[0, :count].tolist() == [score for _, score, _ in want]
    assert found.classes[0, :count].tolist() == [number for _, _, number in want]
    assert (found.boxes[0, count:] == 0).all()
    assert (found.classes[0, count:] == -1).all()


def test_boxes_end_at_the_border_of_the_image() -> None:
    boxes = np.array([[-50, -50, 500, 500]], np.float32)
    assert in_source(boxes, Placement(30, 20, 2.0, 2.0)).tolist() == [[0, 0, 30, 20]]


def test_normalized_boxes_and_logits_are_read() -> None:
    rule = Detect("b", form="anchors_first", normalized=True, sigmoid=True, box_format="xyxy", objectness=True)
    row = np.array([[[0.25, 0.5, 0.5, 1.0, 0.0, -800.0, 800.0]]], np.float32)
    found = detections(rule, [row], SIZE, None)
    assert found.boxes[0, 0].tolist() == [24, 32, 48, 64]
    assert (found.scores[0, 0], found.classes[0, 0]) == (0.5, 1)


def test_boxes_with_values_that_are_not_finite_are_dropped() -> None:
    row = np.array(
        [[[np.nan, 1, 2, 3, 0.9], [1, 1, np.inf, 2, 0.9], [1, 1, 2, 2, np.nan], [1, 1, 2, 2, 0.8]]], np.float32
    )
    found = detections(Detect("b", form="anchors_first", box_format="xyxy"), [row], SIZE, None)
    assert found.counts.tolist() == [1]
    assert found.scores[0, 0] == np.float32(0.8)


def test_only_the_best_of_too_many_candidates_are_kept() -> None:
    count = 3 * CANDIDATES_MAX
    boxes = np.zeros((1, 5, count), np.float32)
    boxes[0, 0] = np.arange(count) % 90
    boxes[0, 2:4] = 1.0
    boxes[0, 4] = np.linspace(0.3, 0.9, count)
    found = detections(Detect("b", detections_max=50), [boxes], SIZE, None)
    assert found.counts.tolist() == [50]
    assert found.scores[0].min() >= boxes[0, 4, -CANDIDATES_MAX]
    assert found.scores[0, 0] == boxes[0, 4, -1]


def test_boxes_of_different_images_do_not_suppress_each_other() -> None:
    rows = np.array([[[5, 5, 4, 4, 0.9]], [[5, 5, 4, 4, 0.1]], [[6, 6, 4, 4, 0.8]]], np.float32)
    found = detections(
        Detect("b", form="anchors_first"), [rows], SIZE, [Placement(96, 64), Placement(96, 64), Placement(48, 32, 2, 2)]
    )
    assert found.counts.tolist() == [1, 0, 1]
    assert found.boxes[2, 0].tolist() == [2, 2, 4, 4]


def test_an_output_of_another_form_is_refused() -> None:
    with pytest.raises(EngineFailed, match="form"):
        detections(Detect("b"), [np.zeros((1, 4, 10), np.float32)], SIZE, None)
    with pytest.raises(EngineFailed, match="form"):
        detections(Detect("b", "s"), [np.zeros((1, 4, 10), np.float32), np.zeros((1, 2, 9), np.float32)], SIZE, None)


def test_many_boxes_are_suppressed_by_the_same_rule_as_few_boxes() -> None:
    random = np.random.default_rng(0)
    corners = random.integers(0, 60, (2 * TOGETHER_MAX, 4)).astype(np.float32)
    corners[:, 2:] += corners[:, :2]
    classes = random.integers(0, 3, len(corners))
    scores = [[1.0 if c == number else 0.0 for c in range(3)] for number in classes]
    for count in (TOGETHER_MAX, TOGETHER_MAX + 1, len(corners)):
        want = reference([tuple(box) for box in corners[:count].tolist()], scores[:count], Detect("b"))
        kept = suppress(corners[:count], classes[:count], 0.45, 300)
        assert [tuple(box) for box in corners[kept].tolist()] == [box for box, _, _ in want]


def test_an_answer_may_have_no_boxes() -> None:
    found = detections(Detect("b"), [np.zeros((2, 6, 0), np.float32)], SIZE, None)
    assert found.counts.tolist() == [0, 0]
    assert len(suppress(np.zeros((0, 4), np.float32), np.zeros(0, np.int64), 0.5, 10)) == 0
