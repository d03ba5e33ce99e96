"""Vectors of token states: the mean over the mask or the first token's state, scaled to length 1."""

from __future__ import annotations

import numpy as np

from edgert.bundle.text_rules import Embed
from edgert.processing.answers.embedding import embeddings

STATES = np.random.default_rng(0).normal(0, 1, (3, 5, 8)).astype(np.float32)
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_the_mean_counts_the_tokens_of_the_mask_alone() -> None:
    made = embeddings(Embed("y", mask="mask", normalize=False), STATES, MASK)
    np.testing.assert_allclose(made[0], STATES[0].mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(made[1], STATES[1, :2].mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(made[2], np.zeros(8))
    assert made.dtype == np.float32


def test_padding_changes_nothing() -> None:
    wide = np.concatenate((STATES, 1e6 * np.ones_like(STATES)), axis=1)
    mask = np.concatenate((MASK, np.zeros_like(MASK)), axis=1)
    rule = Embed("y", mask="mask")
    np.testing.assert_allclose(embeddings(rule, wide, mask), embeddings(rule, STATES, MASK), rtol=1e-5, atol=1e-6)


def test_vectors_are_scaled_to_the_length_1() -> None:
    for rule in (Embed("y", mask="mask"), Embed("y", "cls")):
        made = embeddings(rule, STATES.astype(np.float16), MASK)[:2]
        np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(embeddings(Embed("y", "cls", normalize=False), STATES, None), STATES[:, 0])
    np.testing.assert_array_equal(embeddings(Embed("y", "none", normalize=False), STATES[:, 0], None), STATES[:, 0])
    assert not embeddings(Embed("y", "none"), np.zeros((1, 4), np.float32), None).any()
