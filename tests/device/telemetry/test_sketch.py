"""The sketch's guarantee: merging is exact in any order, and quantiles are within the stated bound."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgert.errors import ProtocolError
from edgert.telemetry.sketch import INDEX_MAX, INDEX_MIN, RELATIVE_ERROR_MAX, Sketch, merged
from tests.support.sketches import sketch_of

latencies_ms = st.floats(min_value=0.001, max_value=900_000, allow_nan=False)
samples = st.lists(latencies_ms | st.just(0.0), max_size=80)
quantiles = st.floats(min_value=0, max_value=1)


def nearest_rank(values: list[float], q: Fraction | float) -> float:
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


@given(st.lists(samples, max_size=6), st.randoms())
def test_merging_in_any_order_equals_the_sketch_of_the_pooled_samples(
    parts: list[list[float]], shuffler: random.Random
) -> None:
    pooled = sketch_of([value for part in parts for value in part])
    shuffled = [sketch_of(part) for part in parts]
    shuffler.shuffle(shuffled)
    total = merged(shuffled)
    assert total == pooled
    assert total.sum == pytest.approx(pooled.sum)


@given(samples, samples, samples)
def test_merging_is_associative(a: list[float], b: list[float], c: list[float]) -> None:
    left = merged([merged([sketch_of(a), sketch_of(b)]), sketch_of(c)])
    right = merged([sketch_of(a), merged([sketch_of(b), sketch_of(c)])])
    assert left == right


@given(st.lists(latencies_ms, min_size=1, max_size=300), quantiles)
def test_a_quantile_is_within_the_stated_error_of_the_exact_quantile(values: list[float], q: float) -> None:
    assert RELATIVE_ERROR_MAX < 0.0109
    assert sketch_of(values).quantile(q) == pytest.approx(nearest_rank(values, q), rel=RELATIVE_ERROR_MAX + 1e-9)


def drawn(number: int) -> list[float]:
    """Return one of 40 samples: four families of distributions, in sizes that reveal errors of the rank."""
    dice = random.Random(number)
    families = (
        lambda: dice.lognormvariate(1, 1.5),
        lambda: dice.expovariate(0.1),
        lambda: dice.paretovariate(0.6),
        lambda: dice.choice((1.0, 1000.0)) * dice.uniform(0.5, 2),
    )
    size = (100, 1_000, 3_000, 10_000, 20_000)[number % 5] + (number // 20) * 7
    return [max(0.001, min(families[number % 4](), 900_000)) for _ in range(size)]


@pytest.mark.parametrize("number", range(40))
def test_every_percentile_that_a_user_writes_has_its_exact_rank(number: int) -> None:
    sample = drawn(number)
    sketch = sketch_of(sample)
    for text in ("50", "75", "90", "95", "99", "99.5", "99.9", "99.95", "99.99"):
        for share in (Fraction(text) / 100, float(Fraction(text) / 100)):
            right = nearest_rank(sample, Fraction(text) / 100)
            assert sketch.quantile(share) == pytest.approx(right, rel=RELATIVE_ERROR_MAX + 1e-9), text


@given(samples)
def test_a_sketch_is_read_back_from_its_wire_form_unchanged(values: list[float]) -> None:
    sketch = sketch_of(values)
    copy = Sketch.decode(sketch.encode(), zero=sketch.zero, sum_ms=sketch.sum, min_ms=sketch.min, max_ms=sketch.max)
    assert copy == sketch
    assert copy.sum == sketch.sum


def test_the_extremes_of_clamped_values_stay_exact() -> None:
    sketch = sketch_of([1e-9, 1e12])
    assert sketch.buckets == {INDEX_MIN: 1, INDEX_MAX: 1}
    assert (sketch.min, sketch.max, sketch.quantile(1)) == (1e-9, 1e12, 1e12)


def test_values_of_zero_have_their_own_bucket() -> None:
    sketch = sketch_of([0.0, -3.0, 5.0])
    assert (sketch.zero, sketch.count, sketch.min, sketch.quantile(0.5)) == (2, 3, 0.0, 0.0)


def test_an_empty_sketch_answers_zero() -> None:
    assert Sketch().quantile(0.99) == 0
    assert Sketch().encode() == ""


def test_the_merged_sketch_is_right_although_the_mean_of_the_percentiles_is_wrong() -> None:
    # Nine fast devices and a slow one show the reason why devices send sketches, not percentiles.
    fleet = [[1.0] * 1000 for _ in range(9)] + [[100.0] * 1000]
    pooled = [value for device in fleet for value in device]
    right = merged(sketch_of(device) for device in fleet).quantile(0.95)
    mean_of_percentiles = sum(sketch_of(device).quantile(0.95) for device in fleet) / len(fleet)
    assert right == pytest.approx(nearest_rank(pooled, 0.95), rel=RELATIVE_ERROR_MAX)
    assert mean_of_percentiles == pytest.approx(10.9, rel=0.02)


@pytest.mark.parametrize(
    "text", ["x", "1", "1:", "1:0", "1:-4", "5:1,5:1", "6:1,5:1", "641:1", "-321:1", "1:2,", "1.5:1"]
)
def test_a_malformed_wire_form_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        Sketch.decode(text)


@pytest.mark.parametrize("fields", [{"zero": -1}, {"min_ms": 2.0, "max_ms": 1.0}, {"sum_ms": math.inf}])
def test_impossible_scalars_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ProtocolError):
        Sketch.decode("1:1", **fields)  # type: ignore[arg-type]
