"""Each output is judged by the values that an app reads from it, which shows errors that a cosine hides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.rules import Ctc
from edgert_deploy.packager.accuracy.fp32_agreement import (
    NEIGHBOUR_BLOCK,
    map_agreement,
    neighbour_agreement,
    same_neighbours,
    unit_vectors,
    value_agreement,
)
from tests.support.models.outputs import judged, softmax, yolo

Array = NDArray[Any]
RANDOM = np.random.default_rng(3)


def ctc_scores(classes: int) -> Array:
    """Scores `[20, 40, classes]` of a text recognizer; class 0 is the blank of about half of the steps."""
    return softmax(RANDOM.normal(0, 3, (20, 40, classes)) + 6 * np.eye(classes)[0])


OUTPUTS = {
    "boxes": yolo(),
    "top1": softmax(RANDOM.normal(0, 3, (20, 7))),
    "texts": ctc_scores(30),
    "thresholds": RANDOM.uniform(0, 1, (30, 1)).astype(np.float32),
    "maps": (RANDOM.uniform(0, 1, (5, 1, 32, 32)) ** 4).astype(np.float32),
    "masks": RANDOM.integers(0, 3, (5, 32, 32)),
    "neighbours": RANDOM.normal(0, 1, (12, 64)).astype(np.float32),
    "values": (RANDOM.normal(0, 1, (12, 42)) + 50).astype(np.float32),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_kind_of_output_is_recognized_and_fp32_agrees_with_itself(name: str) -> None:
    reference = OUTPUTS[name]
    (judgement,) = judged(reference)
    assert judgement.name == name
    assert judgement.score([reference], [reference]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", OUTPUTS)
def test_answers_of_noise_do_not_pass(name: str) -> None:
    reference = OUTPUTS[name]
    (judgement,) = judged(reference)
    noise = RANDOM.permuted(reference, axis=None).reshape(reference.shape)
    assert judgement.score([noise], [reference]) < 0.8


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "masks"])
def test_answers_that_are_not_finite_do_not_pass(name: str) -> None:
    reference = OUTPUTS[name]
    (judgement,) = judged(reference)
    assert judgement.score([np.full_like(reference, np.nan)], [reference]) < 0.8


def test_a_constant_answer_does_not_agree_with_positive_single_values() -> None:
    reference = RANDOM.uniform(20, 30, (50, 1)).astype(np.float32)
    (judgement,) = judged(reference)
    assert judgement.score([np.full_like(reference, 25.0)], [reference]) < 0.1


def test_one_bad_channel_among_many_good_channels_is_noticed() -> None:
    reference = RANDOM.normal(0, 1, (40, 10, 300)).astype(np.float32)
    answers = reference.copy()
    answers[:, 3] = 0
    assert value_agreement(answers, reference) < 0.1


def test_a_channel_that_never_varies_is_measured_with_the_scale_of_the_others() -> None:
    reference = RANDOM.normal(0, 1, (40, 10)).astype(np.float32)
    reference[:, 0] = 1.0
    answers = reference.copy()
    answers[:, 0] += 1e-4
    assert value_agreement(answers, reference) > 0.999


def test_a_pitch_for_each_moment_is_judged_by_its_values_and_not_by_its_direction() -> None:
    """Half of each pitch is one octave too low, but its cosine is 1. Example: SwiftF0."""
    times, starts = np.arange(62), RANDOM.uniform(0, 6, (20, 1))
    pitch = (440 * np.maximum(0, np.sin(times / 5 + starts))).astype(np.float32)  # 0 if nobody sings
    (judgement,) = judged(pitch)
    assert judgement.name == "values"
    assert judgement.score([pitch / 2], [pitch]) < 0.9


def test_a_pitch_of_pauses_does_not_count_if_another_output_has_its_confidence() -> None:
    """Between words, a model of pitch answers any pitch, with a low confidence."""
    voiced = np.tile(np.arange(60) % 20 < 8, (12, 1))
    pitch = np.where(voiced, RANDOM.uniform(100, 300, (12, 60)), RANDOM.uniform(50, 2000, (12, 60))).astype(np.float32)
    confidence = np.where(voiced, 0.9, 0.1).astype(np.float32)
    found, other = judged(pitch, confidence)
    assert (found.name, other.name) == ("confident", "thresholds")
    changed = {where: np.where(voiced == where, pitch.mean(), pitch).astype(np.float32) for where in (True, False)}
    assert found.score([changed[False], confidence], [pitch, confidence]) == 1.0
    assert found.score([changed[True], confidence], [pitch, confidence]) < 0.1


def test_neighbours_are_found_across_blocks_of_samples() -> None:
    """A table of all pairs of 30,000 samples has 7 GB."""
    count = 2 * NEIGHBOUR_BLOCK + 3
    reference = RANDOM.normal(0, 1, (count, 16)).astype(np.float32)
    answers = reference + RANDOM.normal(0, 0.2, reference.shape).astype(np.float32)
    cosines = unit_vectors(reference) @ unit_vectors(reference).T
    seen = unit_vectors(answers) @ unit_vectors(answers).T
    others = ~np.eye(count, dtype=bool)
    nearest = cosines.max(axis=1, initial=-2, where=others)
    tolerance = np.minimum(0.01, 0.05 * (nearest - cosines.mean(axis=1, where=others)))
    chosen = np.where(others, seen, -2).argmax(axis=1)
    want = cosines[np.arange(count), chosen] >= nearest - tolerance
    np.testing.assert_array_equal(same_neighbours(answers, reference), want)
    assert 0.1 < want.mean() < 0.9


def test_an_equally_near_neighbour_counts_as_the_same_only_where_cosines_differ() -> None:
    ring = np.eye(12, dtype=np.float32) + np.roll(np.eye(12, dtype=np.float32), 1, axis=1)  # two equal neighbours each
    noise = RANDOM.normal(0, 1, ring.shape).astype(np.float32)
    assert neighbour_agreement(ring + 0.002 * noise, ring + 0.001 * noise[::-1]) > 0.99
    close = np.eye(12, dtype=np.float32) + 0.004 * noise  # all cosines within 0.03
    noisy = close + 0.004 * noise[::-1]
    assert neighbour_agreement(noisy, close) < 0.9


def test_every_output_of_a_model_is_judged() -> None:
    found = judged(OUTPUTS["thresholds"], OUTPUTS["values"])
    assert [(one.name, one.outputs) for one in found] == [("thresholds", ("out0",)), ("values", ("out1",))]


def test_whole_numbers_are_compared_for_equality() -> None:
    reference = RANDOM.integers(0, 5, (10, 8))
    (judgement,) = judged(reference)
    answers = reference.copy()
    answers[:5] += 1
    assert judgement.score([answers], [reference]) == pytest.approx(0.5)


def test_a_class_that_is_lost_from_a_mask_is_not_hidden_by_the_background() -> None:
    reference = np.zeros((6, 1, 32, 32), np.int64)
    reference[:, :, 4:14, 4:14] = 7
    reference[:, :, 20:23, 20:23] = 2
    (judgement,) = judged(reference)
    lost = np.where(reference == 2, 0, reference)
    assert (lost == reference).mean() > 0.99
    assert judgement.score([lost], [reference]) == pytest.approx(0.5)
    assert judgement.score([np.where(reference == 2, 3, reference)], [reference]) == pytest.approx(0.5)
    assert judgement.score([np.full_like(reference, 9)], [reference]) == 0.0
    assert judgement.score([np.zeros_like(reference)], [np.zeros_like(reference)]) == 1.0


def test_the_bytes_of_a_quantized_output_are_not_taken_for_classes() -> None:
    blurred = np.linspace(0, 255, 32 * 32).astype(np.uint8).reshape(1, 32, 32).repeat(5, axis=0)  # equal neighbours
    for values in (RANDOM.integers(0, 255, (5, 32, 32)).astype(np.uint8), blurred, blurred.astype(np.int8)):
        (judgement,) = judged(values)
        assert judgement.name == "values"


def test_a_mask_of_bytes_is_judged_by_its_classes() -> None:
    """YOLO26's semantic segmentation answers UINT8. Earlier code counted equal values, most of them background."""
    reference = np.zeros((6, 32, 32), np.uint8)
    reference[:, 4:14, 4:14], reference[:, 20:23, 20:23] = 7, 2
    (judgement,) = judged(reference)
    assert judgement.name == "masks"
    assert judgement.score([np.where(reference == 2, 0, reference)], [reference]) == pytest.approx(0.5)


def test_texts_are_read_with_the_stated_blank_and_axis() -> None:
    steps = np.eye(3, dtype=np.float32)[[[2, 2, 0, 2, 1, 1], [1, 2, 1, 0, 0, 0]]]
    rule = Ctc("out0", ("", "a", "b"), time_axis="last")
    scores = steps.transpose(0, 2, 1)
    other = scores.copy()
    other[1, :, 2] = [1, 0, 0]  # "ab" instead of "aba"
    (one,) = judged(scores, ctc=rule)
    assert (one.name, one.score([scores], [scores]), one.score([other], [scores])) == ("texts", 1.0, 0.5)
    later = scores.copy()
    later[0, :, 1] = [1, 0, 0]  # a shorter run decodes to the same text
    assert one.score([later], [scores]) == 1.0


def test_a_map_is_judged_at_each_threshold_that_apps_take() -> None:
    """Half of the positions above a threshold of 0.3 are lost, but no position above 0.5 is lost."""
    reference = np.zeros((2, 1, 16, 16), np.float32)
    reference[:, :, :8], reference[:, :, 8:] = 0.9, 0.35
    answers = np.where(reference == 0.9, reference, np.float32(0.25))
    assert map_agreement(answers, reference) == 0.5
    assert map_agreement(reference, reference) == 1.0


@pytest.mark.parametrize("name", ["top1", "texts"])
def test_logarithms_of_probabilities_rank_classes_like_the_probabilities(name: str) -> None:
    """Example: a classifier of PyTorch that ends with log_softmax."""
    (found,) = judged(np.log(OUTPUTS[name]))
    assert found.name == name


def test_classes_of_each_step_of_an_input_are_not_taken_for_text() -> None:
    """A text recognizer has fewer steps than its input. One wrong letter makes a wrong text; one wrong tag does not."""
    texts, scores = ctc_scores(5), softmax(RANDOM.normal(0, 3, (20, 40, 5)))
    assert [judged(texts, inputs=[shape])[0].name for shape in ((40,), (1, 32, 160))] == ["steps", "texts"]
    (one,) = judged(scores, inputs=[(40,)])
    assert one.name == "steps"
    other = scores.copy()
    other[0, 0] = np.roll(scores[0, 0], 1)
    assert 0.995 < one.score([other], [scores]) < 1.0
    assert one.score([scores], [scores]) == 1.0
    assert one.score([softmax(RANDOM.normal(0, 3, (20, 40, 5)))], [scores]) < 0.4
    assert one.score([np.full_like(scores, np.nan)], [scores]) == 0.0


def test_classes_along_a_sequence_without_a_blank_are_not_taken_for_text() -> None:
    """Example: the pitches of the moments of a sound. One wrong pitch among many does not make the sound wrong."""
    pitches = softmax(RANDOM.normal(0, 3, (20, 101, 60)))
    (one,) = judged(pitches, inputs=[(16000,)])
    other = pitches.copy()
    other[:, 0] = np.roll(pitches[:, 0], 1, axis=-1)
    assert one.name == "steps"
    assert one.score([other], [pitches]) == pytest.approx(100 / 101, abs=2e-3)


def test_steps_of_the_background_do_not_hide_losses_in_other_steps() -> None:
    """Half of the few steps outside the background are lost, although nearly all steps agree."""
    classes = np.zeros((8, 100), int)
    classes[:, 10:14] = 1
    lost = classes.copy()
    lost[:, 12:14] = 0
    one_hot = np.eye(3, dtype=np.float32)
    (one,) = judged(one_hot[classes], inputs=[(100, 16)])
    assert one.score([one_hot[lost]], [one_hot[classes]]) == pytest.approx(0.5)


def test_scores_of_many_classes_are_not_taken_for_an_embedding() -> None:
    """Models of sounds have many classes. A score under the threshold is lost, but the vector hardly changes."""
    scores = RANDOM.uniform(0, 0.05, (12, 500)).astype(np.float32)
    scores[np.arange(12), RANDOM.integers(0, 500, 12)] = 0.8
    (one,) = judged(scores)
    assert one.name == "maps"
    assert one.score([scores * 0.5], [scores]) < 0.5
    rows = np.abs(RANDOM.normal(0, 1, (12, 500))) ** 8
    vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)  # of length 1, after a ReLU
    assert judged(vectors)[0].name == "neighbours"


def test_points_in_shares_of_an_image_are_not_taken_for_classes() -> None:
    """68 points of a face: a small error moves many of them across a threshold of scores."""
    points = (RANDOM.uniform(0.1, 0.9, 136) + RANDOM.normal(0, 0.03, (40, 136))).clip(0, 1).astype(np.float32)
    assert [one.name for one in judged(points)] == ["values"]


def test_an_output_with_the_form_of_an_input_is_a_signal_and_not_an_embedding() -> None:
    signal = RANDOM.normal(0, 1, (12, 48)).astype(np.float32)
    assert judged(signal, inputs=[(48,)])[0].name == "values"
    assert judged(signal[..., None], inputs=[(1, 48)])[0].name == "values"  # a logit for each step
    assert judged(signal, inputs=[(3, 48)])[0].name == "neighbours"


def test_a_forecast_from_0_to_1_is_judged_by_its_values() -> None:
    """A forecast of 12 or 48 moments of 3 channels, from 96 moments of the same channels."""
    for moments in (12, 48):
        forecast = RANDOM.uniform(0, 1, (30, moments, 3)).astype(np.float32)
        assert judged(forecast, inputs=[(96, 3)])[0].name == "values"
    decisions = RANDOM.uniform(0, 1, (30, 12, 3)).astype(np.float32)
    assert judged(decisions, inputs=[(96, 40)])[0].name == "thresholds"


def test_values_on_one_side_of_a_half_and_probabilities_of_positions_are_not_taken_for_other_decisions() -> None:
    shares = RANDOM.uniform(0, 0.4, (30, 12)).astype(np.float32)
    assert judged(shares)[0].name == "values"
    scores = softmax(RANDOM.normal(0, 5, (4, 16, 16, 5)).astype(np.float32))
    assert judged(scores, inputs=[(3, 16, 16)])[0].name == "maps"


def test_a_depth_is_judged_over_all_positions_and_not_in_each_row() -> None:
    """The rows of the sky and of the floor hardly vary, so a small error is large there."""
    rows = np.linspace(10, 1, 24)[:, None] + RANDOM.normal(0, 0.02, (20, 24, 32))
    depth = rows.astype(np.float32)
    answers = depth + RANDOM.normal(0, 0.05, depth.shape).astype(np.float32)
    for scale in (1.0, 0.09):  # in metres, or from 0 to 1
        for shape in ((20, 24, 32), (20, 1, 24, 32)):
            (judgement,) = judged(scale * depth.reshape(shape), inputs=[(3, 48, 64)])
            wrong = [scale * depth[:, ::-1].reshape(shape)]
            assert judgement.name == "values"
            assert judgement.score([scale * answers.reshape(shape)], [scale * depth.reshape(shape)]) > 0.99
            assert judgement.score(wrong, [scale * depth.reshape(shape)]) < 0.1
