"""Judge the decisions that apps make from a model's outputs, without labels of the right answers.

A cosine hides errors: it is always near 1 for a tensor that mixes boxes (0 to 320) with scores (0 to 1), and for an
output of one positive value. So this module recognizes each output by its shape and by FP32's values, and judges the
values that an app reads from it. detectors.py and grids.py do so for the outputs of detectors.
docs/accuracy-reference.md has the table of judgements, and fp32_agreement.py computes their scores. FP32 scores 1 in
each judgement. The total score is the lowest score.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from edgert.bundle.rules import Ctc
from edgert.processing.answers.ctc import by_step
from edgert_deploy.packager.accuracy.detectors import IMAGE_RANK, detector_of
from edgert_deploy.packager.accuracy.fp32_agreement import (
    MAP_THRESHOLDS,
    Array,
    Outputs,
    map_agreement,
    mask_agreement,
    neighbour_agreement,
    same_decodings,
    same_neighbours,
    same_sides,
    same_steps,
    same_texts,
    same_top1,
    unit_vectors,
    value_agreement,
)
from edgert_deploy.packager.accuracy.grids import grid_of, of_cells
from edgert_deploy.packager.accuracy.judgement import (
    CLASSES_MAX,
    PROBABILITY_TOLERANCE,
    Judgement,
    are_probabilities,
    within_0_and_1,
)
from edgert_deploy.packager.accuracy.reference import Reference

VECTOR_SIZE_MIN = 16
MAP_POSITIONS_MIN = 64
# An output is judged by thresholds only if at least this share of its values is on each side of 0.5.
MINORITY_MIN = 0.01
NEIGHBOUR_SAMPLES_MIN = 8
ALIKE_MAX = 0.7  # vectors whose mean cosine between samples is higher are not treated as embeddings
SERIES_MIN = 0.5  # vectors whose adjacent values correlate more are series, such as a pitch for each moment
BLANKS_MIN = 0.25  # in texts, at least this share of the steps has one class, the blank
AREAS_MIN = 0.5  # masks consist of areas, in which more neighbours than this share are equal
BYTE_CLASSES_MAX = 191  # the largest class in a mask of 8 bits
# Values over positions are areas if at least this share of them is nearer to 0 or 1 than EXTREME.
EXTREME, EXTREMES_MIN = 0.1, 0.5
CONFIDENT = 0.5  # a value with a lower confidence, such as the pitch of a pause, means nothing


def judgements(reference: Reference) -> tuple[Judgement, ...]:
    """Return the judgements of all outputs, recognized by shape, FP32's values and the user's rules."""
    names = [spec.name for spec in reference.specs]
    answers = reference.answers
    inputs = [array.shape[1:] for array in reference.holdout.inputs.values()]
    unjudged = [i for i, array in enumerate(answers) if np.issubdtype(array.dtype, np.number) or array.dtype == bool]
    judged: list[Judgement] = []
    detector = detector_of(reference, inputs, unjudged)
    if detector is not None:
        judged.append(detector)
        unjudged = [i for i in unjudged if names[i] not in detector.outputs]
    if reference.ctc is not None:
        stated = names.index(reference.ctc.output)
        judged.append(_stated_texts(reference.ctc, stated))
        unjudged = [i for i in unjudged if i != stated]
    steps = {length for shape in inputs if len(shape) < IMAGE_RANK for length in shape}
    has_image = any(len(shape) == IMAGE_RANK for shape in inputs)
    for i in unjudged:
        if has_image and answers[i].shape[1:] not in inputs and (grid := grid_of(answers[i])) is not None:
            judged.append(of_cells(i, names[i], grid))
            continue
        named = reference.classify is not None and _first_scores(answers) == i
        name = _recognized(answers[i], named, steps)
        if name == "neighbours" and _sides(answers[i].shape[1:]) in map(_sides, inputs):
            name = "values"  # an output of an input's shape is a signal: a reconstruction, or a logit for each step
        if name in ("thresholds", "maps") and any(_is_forecast(answers[i].shape[1:], shape) for shape in inputs):
            name = "values"
        if name == "values" and any(_is_picture(answers[i].shape[1:], shape) for shape in inputs):
            judged.append(_of_positions(i, names[i]))
        elif name == "values" and (confidence := _confidence_of(i, answers)) is not None:
            judged.append(_of_confident(i, names[i], confidence))
        else:
            judged.append(_of_one(i, names[i], name))
    return tuple(judged)


def _recognized(reference: Array, named: bool, steps: Collection[int]) -> str:
    """Return the name of the judgement of one output.

    `named` tells whether the user names its classes. `steps` are the lengths of the sequences in the inputs.
    """
    shape = reference.shape[1:]
    positions = int(np.prod(shape)) >= MAP_POSITIONS_MIN and len(_sides(shape)) >= 2
    if reference.dtype.kind != "f":
        return "masks" if positions and _are_classes(reference) else "values"
    if len(shape) == 1 and shape[0] >= 2 and (named or rank_classes(reference)):
        return "top1"
    if len(shape) == 2 and min(shape) >= 2 and rank_classes(reference):
        # The output of a text recognizer has fewer steps than its input, and many of its steps are the blank of CTC.
        return "texts" if shape[0] not in steps and _has_blank(reference) else "steps"
    is_within = within_0_and_1(reference)
    above = float((reference > 0.5).mean()) if reference.size else 0.0
    if is_within and int(np.prod(shape)) < MAP_POSITIONS_MIN and MINORITY_MIN <= above <= 1 - MINORITY_MIN:
        return "thresholds"
    if is_within and ((positions and _are_areas(reference)) or _are_many_classes(reference)):
        return "maps"
    if _are_embeddings(reference):
        return "neighbours"
    return "values"


def _has_blank(reference: Array) -> bool:
    classes = reference.argmax(-1).ravel()
    return bool(np.bincount(classes).max(initial=0) >= BLANKS_MIN * classes.size)


def _are_classes(numbers: Array) -> bool:
    """Return whether whole numbers are classes.

    Numbers under 32 bits are values of a quantized model, except masks of UINT8. The values of a quantized model use
    most of the range, and differ from one position to the next.
    """
    if numbers.dtype.itemsize < 4:
        areas = float((numbers[..., 1:] == numbers[..., :-1]).mean()) >= AREAS_MIN
        if numbers.dtype != np.uint8 or int(numbers.max(initial=0)) > BYTE_CLASSES_MAX or not areas:
            return False
    return bool((numbers >= 0).all()) and 2 <= len(np.unique(numbers)) <= CLASSES_MAX


def _are_areas(reference: Array) -> bool:
    """Return whether values over positions mark areas: most are near 0 or 1, unlike depths."""
    return float(((reference < EXTREME) | (reference > 1 - EXTREME)).mean()) >= EXTREMES_MIN


def _is_forecast(shape: tuple[int, ...], series: tuple[int, ...]) -> bool:
    """Return whether an output `[moments, channels]` continues an input series of the same channels.

    With one channel, scores of classes have the same shape.
    """
    return len(shape) == len(series) == 2 and shape[0] != series[0] and 2 <= shape[1] == series[1] < series[0]


def _is_picture(shape: tuple[int, ...], image: tuple[int, ...]) -> bool:
    """Return whether an output has one value, such as a depth, for each position of an image of any size."""
    sides = _sides(shape)
    if len(sides) != 2 or len(image) != IMAGE_RANK:
        return False
    return any(sides[0] * width == sides[1] * height for height, width in (image[1:], image[:2]))


def _are_many_classes(reference: Array) -> bool:
    """Return whether values of 0 to 1 are scores of many classes.

    Most scores of many classes are low. Vectors of length 1 are embeddings. Values that are mostly high are points, in
    shares of the image.
    """
    flat = reference.reshape(len(reference), -1)
    if flat.shape[1] < MAP_POSITIONS_MIN or float(flat.max(initial=0.0)) <= min(MAP_THRESHOLDS):
        return False
    if float(np.median(flat)) > min(MAP_THRESHOLDS):
        return False
    return not np.allclose(np.linalg.norm(flat, axis=1), 1.0, atol=PROBABILITY_TOLERANCE)


def _of_one(i: int, output: str, name: str) -> Judgement:
    share, score = SHARES.get(name), SCORES.get(name) or (lambda a, b: float(SHARES[name](a, b).mean()))
    return Judgement(
        name,
        (output,),
        lambda answers, reference: score(answers[i], reference[i]),
        None if share is None else lambda answers, reference: share(answers[i], reference[i]),
    )


def _of_positions(i: int, output: str) -> Judgement:
    """Return the judgement of values over positions, which have one channel."""

    def score(answers: Outputs, reference: Outputs) -> float:
        return value_agreement(answers[i].reshape(-1, 1), reference[i].reshape(-1, 1))

    return Judgement("values", (output,), score)


def _confidence_of(i: int, reference: Outputs) -> int | None:
    """Return the number of the output with the confidence of output `i`; None if there is none."""
    sides = _sides(reference[i].shape[1:])
    if reference[i].dtype.kind != "f" or len(sides) != 1 or sides[0] < VECTOR_SIZE_MIN:
        return None
    for j, other in enumerate(reference):
        if j == i or other.shape != reference[i].shape or not within_0_and_1(other):
            continue
        if MINORITY_MIN <= float((other > CONFIDENT).mean()) <= 1 - MINORITY_MIN:
            return j
    return None


def _of_confident(i: int, output: str, confidence: int) -> Judgement:
    def score(answers: Outputs, reference: Outputs) -> float:
        confident = reference[confidence] > CONFIDENT
        return value_agreement(answers[i][confident], reference[i][confident]) if confident.any() else 1.0

    return Judgement("confident", (output,), score)


def _stated_texts(rule: Ctc, i: int) -> Judgement:
    def share(answers: Outputs, reference: Outputs) -> Array:
        return same_decodings(by_step(answers[i], rule), by_step(reference[i], rule), rule.blank)

    return Judgement("texts", (rule.output,), lambda a, b: float(share(a, b).mean()), share)


# The functions that return the share of right decisions in each sample.
SHARES: dict[str, Callable[[Array, Array], Array]] = {
    "top1": same_top1,
    "steps": same_steps,
    "texts": same_texts,
    "thresholds": same_sides,
    "neighbours": same_neighbours,
}
# The functions that return the score of a judgement, if the score is not the mean of these shares.
SCORES: dict[str, Callable[[Array, Array], float]] = {
    "maps": map_agreement,
    "masks": mask_agreement,
    "neighbours": neighbour_agreement,
    "values": value_agreement,
}


def _first_scores(reference: Outputs) -> int:
    return next((i for i, array in enumerate(reference) if array.ndim == 2 and array.shape[1] >= 2), -1)


def rank_classes(rows: Array) -> bool:
    """Return whether the values along the last axis are probabilities, or their logarithms."""
    return are_probabilities(rows) or (rows.shape[-1] > 1 and are_probabilities(np.exp(rows.clip(-80, 1))))


def _are_embeddings(reference: Array) -> bool:
    """Return whether each sample has one vector, with many directions and no order of its values.

    Vectors of coordinates have nearly one direction. A series is no embedding: its values count, not its direction, so
    half of each value would be a wrong answer.
    """
    sides = _sides(reference.shape[1:])
    if len(sides) != 1 or sides[0] < VECTOR_SIZE_MIN or len(reference) < NEIGHBOUR_SAMPLES_MIN:
        return False
    mean = unit_vectors(reference).mean(axis=0)
    if float(mean @ mean) >= ALIKE_MAX:  # the mean cosine of all pairs
        return False
    vectors: Array = reference.reshape(len(reference), -1)
    vectors = unit_vectors(vectors - vectors.mean(axis=1, keepdims=True))
    return float((vectors[:, 1:] * vectors[:, :-1]).sum(axis=1).mean()) < SERIES_MIN


def _sides(shape: tuple[int, ...]) -> list[int]:
    """Return the lengths of the axes that are longer than 1."""
    return [side for side in shape if side > 1]
