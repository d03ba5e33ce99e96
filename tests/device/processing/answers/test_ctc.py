"""Greedy CTC decoding: equal to the definition, and to rapidocr's decoding of its own recognizer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.rules import Ctc
from edgert.processing.answers.ctc import CtcReader, text_of
from tests.support.models.rapidocr_texts import FILE


def scores_of(path: list[int], classes: int = 4) -> NDArray[np.float32]:
    """Return scores [1, steps, classes] whose best classes are `path`, each with the probability 0.7."""
    rest = 0.3 / (classes - 1)
    return np.where(np.eye(classes, dtype=bool)[path], 0.7, rest).astype(np.float32)[None]


def read(rule: Ctc, scores: NDArray[Any]) -> tuple[list[str], list[float]]:
    rows, probabilities = CtcReader(rule)(scores)
    assert (rows.dtype.name, probabilities.dtype.name) == ("uint8", "float32")
    return [text_of(row) for row in rows], probabilities.tolist()


def test_the_text_equals_the_text_of_rapidocr() -> None:
    with np.load(FILE) as file:
        made = {name: file[name] for name in file.files}
    labels = ("", *made["characters"].tobytes().decode().split("\n"), " ")
    scores = np.zeros((*made["classes"].shape[:2], len(labels)), np.float32)
    np.put_along_axis(scores, made["classes"].astype(np.int64), made["probabilities"], axis=-1)
    texts, probabilities = read(Ctc("x", labels, softmax=False), scores)
    assert texts == made["texts"].tolist()
    assert probabilities == pytest.approx(made["means"].tolist(), abs=1e-6)


def test_every_short_path_is_decoded_as_in_the_definition() -> None:
    for path in itertools.product(range(3), repeat=6):
        merged = [c for c, _ in itertools.groupby(path)]
        want = "".join("-ab"[c] for c in merged if c)
        assert read(Ctc("x", ("-", "a", "b"), softmax=False), scores_of(list(path), 3))[0] == [want]


def test_another_blank_and_another_time_axis_and_letters_of_several_bytes_are_read() -> None:
    rule = Ctc("x", ("ä", "日本", " ", "<blank>"), blank=3)
    scores = np.log(np.concatenate([scores_of([0, 0, 3, 0, 2, 1]), scores_of([3] * 6)]))
    assert read(rule, scores)[0] == ["ää 日本", ""]
    rows, _ = CtcReader(rule)(scores)
    assert rows.shape == (2, len("ää 日本".encode()))
    last = Ctc("x", rule.labels, blank=3, time_axis="last")
    assert read(last, scores.transpose(0, 2, 1))[0] == ["ää 日本", ""]
    assert CtcReader(rule)(scores[1:])[0].tolist() == [[0]], "an empty text has room, too"


def test_logits_and_probabilities_give_the_same_probability() -> None:
    probabilities = scores_of([1, 1, 0, 2])
    logits = np.log(probabilities) + 7
    labels = ("", "a", "b", "c")
    assert read(Ctc("x", labels), logits)[1] == pytest.approx([0.7])
    assert read(Ctc("x", labels, softmax=False), probabilities)[1] == pytest.approx([0.7])
    assert read(Ctc("x", labels), scores_of([0, 0]))[1] == [0.0]
