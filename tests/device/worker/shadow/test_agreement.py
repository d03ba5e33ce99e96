"""The conditions for the agreement of two answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import new_key
from edgert.worker.shadow.agreement import compare, scores_output
from tests.support.bundles import make_null_bundle


def arrays(*rows: Sequence[float]) -> list[NDArray[Any]]:
    return [np.array(rows, np.float32)]


def test_answers_with_scores_agree_if_their_top_classes_are_equal() -> None:
    assert compare(arrays([1, 2, 3]), arrays([0, 0, 9]), 0).agrees
    assert not compare(arrays([1, 2, 3]), arrays([3, 2, 1]), 0).agrees
    assert not compare(arrays([1, 2], [1, 2]), arrays([1, 2], [2, 1]), 0).agrees, "every item of a request counts"


def test_answers_without_scores_agree_if_their_values_are_similar() -> None:
    assert compare(arrays([1, 2, 3]), arrays([1.01, 2, 3]), None).agrees
    assert compare(arrays([1, 0]), arrays([0, 1]), None) == (False, 0.0)
    assert compare(arrays([0, 0]), arrays([0, 0]), None) == (True, 1.0)


@pytest.mark.parametrize("scores", [0, None])
def test_values_that_are_not_finite_and_other_shapes_never_agree(scores: int | None) -> None:
    for other in (arrays([float("nan"), 1, 3]), arrays([1, 2]), arrays([1, 2, float("inf")])):
        assert not compare(other, arrays([1, 2, 3]), scores).agrees


def test_an_output_with_one_axis_of_several_classes_holds_scores(tmp_path: Path) -> None:
    for shape, scores in (((4,), 0), ((1,), None), ((2, 2), None)):
        path = make_null_bundle(tmp_path / str(shape), new_key(), item_shape=shape)
        with open_bundle(path, None) as bundle:
            assert scores_output(bundle.manifest) == scores
