"""Buckets: the sizes and axes that a manifest may state, and the size for a length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgert.bundle.buckets import Buckets, CutOutput, PaddedInput, check_buckets
from edgert.errors import BundleError, RequestError
from edgert.tensors import TensorSpec

IDS = TensorSpec("ids", "INT64", (-1, -1))
STATES = TensorSpec("states", "FP32", (-1, -1, 16))
BUCKETS = Buckets("tokens", (8, 16), (PaddedInput("ids", 1),), (CutOutput("states", 1),), (3, 16))


def check(buckets: Buckets) -> None:
    check_buckets(buckets, (IDS,), (STATES,))


def test_the_smallest_bucket_that_holds_a_length_is_taken() -> None:
    assert [BUCKETS.size_for(n) for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
    for length in (0, 17):
        with pytest.raises(
            RequestError, match=f"has length {length} along axis 'tokens'; the model was built for 1 to 16"
        ):
            BUCKETS.size_for(length)


def test_specs_are_known_at_each_length_also_of_outputs_that_are_shorter() -> None:
    half = replace(BUCKETS, outputs=(CutOutput("states", 1, 2),))
    assert half.spec_at(IDS, 8).shape == (-1, 8)
    assert [half.spec_at(STATES, n).shape for n in (8, 7, 1)] == [(-1, 4, 16), (-1, 4, 16), (-1, 1, 16)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sizes": ()}, "1 to 16 different lengths from 1 up, in ascending order"),
        ({"sizes": (16, 8)}, "ascending"),
        ({"sizes": (8, 8)}, "ascending"),
        ({"sizes": (0, 8)}, "ascending"),
        ({"sizes": tuple(range(1, 18))}, "1 to 16 different lengths"),
        ({"sizes": (8, 2**25)}, "at most 16777216"),
        ({"inputs": ()}, "do not name the open axis of every input"),
        ({"inputs": (PaddedInput("ids", 2),)}, "of every input"),
        ({"inputs": (PaddedInput("other", 1),)}, "of every input"),
        ({"outputs": ()}, "of every output"),
        ({"outputs": (CutOutput("states", 1, 0),)}, "output 'states' has the divisor 0; give at least 1"),
        ({"golden_lengths": (3, 17)}, "has length 17; the buckets allow 1 to 16"),
    ],
)
def test_buckets_that_do_not_fit_the_model_are_refused(changes: dict[str, Any], says: str) -> None:
    check(BUCKETS)
    with pytest.raises(BundleError, match=says):
        check(replace(BUCKETS, **changes))
