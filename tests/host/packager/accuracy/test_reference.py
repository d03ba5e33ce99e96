"""The reference compares what devices answer: the vectors of an embedding, and all other outputs unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.text_rules import Embed
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.accuracy_gate import judge
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.samples.samples import CalibrationSet
from tests.support.models.metrics import EYE, LIMITS, SCORES, reference_to

TOKENS, SIZE = 4, 3
STATES = TensorSpec("states", "FP32", (-1, TOKENS, SIZE))
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.int64)


def states(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((len(MASK), TOKENS, SIZE)).astype(np.float32)


def a_reference(rule: Embed, answers: list[Any], *specs: TensorSpec) -> Reference:
    return Reference(specs or (STATES,), answers, CalibrationSet({"ids": MASK, "mask": MASK}, None), embed=rule)


def test_without_an_embedding_every_output_is_judged_unchanged() -> None:
    reference = reference_to((SCORES,), [EYE])
    answers = [2 * EYE]
    assert reference.with_embeddings(answers) is answers
    assert reference.as_embeddings() is reference


def test_the_mean_is_taken_over_the_tokens_that_the_mask_marks() -> None:
    (vectors,) = a_reference(Embed("states", mask="mask", normalize=False), [states()]).with_embeddings([states(1)])
    np.testing.assert_allclose(vectors[0], states(1)[0, :2].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(vectors[1], states(1)[1].mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(vectors[2], np.zeros(SIZE), "a text without a token has no direction")


def test_changes_of_masked_tokens_do_not_reduce_the_accuracy() -> None:
    whole = states()[:2]
    reference = Reference(
        (STATES,), [whole], CalibrationSet({"mask": MASK[:2]}, None), embed=Embed("states", mask="mask")
    )
    noisy = whole.copy()
    noisy[0, 2:] = 1e6
    metric = metric_for("auto", reference.as_embeddings())
    assert judge(metric, reference, [noisy], LIMITS).accuracy.drop == pytest.approx(0, abs=1e-6)
    noisy[0, :2] *= -1
    assert judge(metric, reference, [noisy], LIMITS).accuracy.drop > LIMITS.max_drop


def test_the_named_output_becomes_vectors_and_keeps_its_place_among_the_outputs() -> None:
    scores, pooled = TensorSpec("scores", "FP32", (-1, 3)), Embed("states", "cls")
    reference = a_reference(pooled, [EYE, states()], scores, STATES).as_embeddings()
    assert [spec.name for spec in reference.specs] == ["scores", "states_embedding"]
    assert reference.specs[1] == TensorSpec("states_embedding", "FP32", (-1, SIZE))
    assert reference.answers[0] is EYE
    first = states()[:, 0]
    np.testing.assert_allclose(reference.answers[1], first / np.linalg.norm(first, axis=1, keepdims=True), rtol=1e-6)
    assert reference.embed is None
    assert reference.as_embeddings() is reference, "vectors are made once"
    answers = [EYE, reference.answers[1]]
    assert reference.with_embeddings(answers) is answers


def test_an_output_with_one_vector_for_each_sample_is_only_normalized() -> None:
    vectors = np.array([[3, 4], [0, 0], [1e-30, 0]], np.float64)
    spec = TensorSpec("y", "FP64", (-1, 2))
    reference = a_reference(Embed("y", "none"), [vectors], spec).as_embeddings()
    np.testing.assert_allclose(reference.answers[0], [[0.6, 0.8], [0.0, 0.0], [0.0, 0.0]], atol=1e-7)
    assert reference.answers[0].dtype == np.float32
    assert reference.specs == (TensorSpec("y_embedding", "FP32", (-1, 2)),)


@pytest.mark.parametrize("samples", [0, 1, 3])
def test_the_list_of_all_rows_has_each_row_of_the_hold_out(samples: int) -> None:
    rows = reference_to((SCORES,), [EYE[:samples]]).all_rows
    assert rows.tolist() == list(range(samples))
    assert len(EYE[rows]) == samples
