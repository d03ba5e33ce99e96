"""Greedy CTC decoding: turns the class scores of each step into text (Graves et al. 2006, best path)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Ctc
from edgert.tensors import byte_rows


class CtcReader:
    """Applies `rule` to scores [N, steps, classes] (or [N, classes, steps])."""

    def __init__(self, rule: Ctc) -> None:
        self._rule = rule
        self._texts = [label.encode() for label in rule.labels]

    def __call__(self, scores: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the texts as UTF-8, UINT8 [N, bytes] padded with zeros, and their probabilities FP32 [N].

        A text's probability is the mean of the probabilities of its classes; 0 for an empty text.
        """
        texts, probabilities = [], np.zeros(len(scores), np.float32)
        for i, steps in enumerate(by_step(scores, self._rule)):
            read, places = greedy(steps, self._rule.blank)
            texts.append(b"".join([self._texts[c] for c in read]))
            if len(read):
                probabilities[i] = self._probabilities(steps[places], read).mean()
        rows = byte_rows(texts)
        return rows if rows.shape[1] else np.zeros((len(texts), 1), np.uint8), probabilities

    def _probabilities(self, steps: NDArray[Any], classes: NDArray[np.intp]) -> NDArray[np.float32]:
        best: NDArray[np.float32] = steps[np.arange(len(steps)), classes].astype(np.float32)
        if self._rule.softmax:
            best = 1 / np.exp(steps.astype(np.float32) - best[:, None]).sum(axis=1)
        return best


def text_of(row: NDArray[np.uint8]) -> str:
    return row.tobytes().rstrip(b"\0").decode("utf-8", "replace")


def by_step(scores: NDArray[Any], rule: Ctc) -> NDArray[Any]:
    """Return scores as [N, steps, classes]."""
    return scores if rule.time_axis == "first" else scores.transpose(0, 2, 1)


def greedy(steps: NDArray[Any], blank: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the decoded classes of [steps, classes], and for each class the step where it begins."""
    best = steps.argmax(axis=-1)
    first = np.ones(len(best), bool)
    first[1:] = best[1:] != best[:-1]
    places = np.flatnonzero(first & (best != blank))
    return best[places], places
