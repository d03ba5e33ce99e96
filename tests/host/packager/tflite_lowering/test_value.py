"""The operators of a formula of values compute the same as NumPy, at any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert.interpreter import Interpreter

from edgert_deploy.packager.tflite_lowering import OPS
from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Graph
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.value import BOOL, FLOAT32, INT32, INT64, Unsupported, Value, broadcast
from tests.support.models.tflite_cases import BATCHES, random, run_tflite

Array = NDArray[Any]
ITEM = (3, 4)
ROW = np.array([1, -2, 3, -4], np.float32)
COLUMN = np.array([[1], [2], [3]], np.float32)


def an_input(*item: int, dtype: np.dtype[Any] = FLOAT32) -> tuple[Lowering, Value]:
    """Return a file with the input `x`, whose batch is open, and the value of `x`."""
    shape = BatchShape((1, *item), (-1, *item))
    nothing: frozenset[str] = frozenset()
    graph = Graph(17, (), {}, nothing, nothing, nothing, {}, {"x": shape}, {"x": dtype}, ("x",), ("y",))
    lowering = Lowering(graph, OPS)
    lowering.define_input("x")
    return lowering, Value(lowering, "y", lowering.tensor("x", Layout.NATIVE), shape, dtype)


def file_of(formula: Callable[[Value], Value], item: tuple[int, ...] = ITEM, dtype: np.dtype[Any] = FLOAT32) -> bytes:
    lowering, x = an_input(*item, dtype=dtype)
    return lowering.writer.finish({"x": x.tensor}, {"y": formula(x).tensor})


def samples(batch: int, item: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    values = random(batch, *item, seed=batch)
    return values if dtype == FLOAT32 else (9 * values).astype(dtype)


def assert_computes(
    formula: Callable[[Value], Value],
    wanted: Callable[[Array], Array],
    item: tuple[int, ...] = ITEM,
    dtype: np.dtype[Any] = FLOAT32,
) -> None:
    content = file_of(formula, item, dtype)
    for batch in BATCHES:
        x = samples(batch, item, dtype)
        (got,), want = run_tflite(content, {"x": x}), np.asarray(wanted(x))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        (lambda x: x + 1, lambda x: x + 1),
        (lambda x: x - 0.5, lambda x: x - 0.5),
        (lambda x: 1 - x, lambda x: 1 - x),
        (lambda x: x * ROW, lambda x: x * ROW),
        (lambda x: x / ROW, lambda x: x / ROW),
        (lambda x: x * x - x, lambda x: x * x - x),
        (lambda x: x.op("ADD", 6.0, activation="RELU6"), lambda x: np.clip(x + 6, 0, 6)),
        (lambda x: x * COLUMN, lambda x: x * COLUMN),
        (lambda x: x.cast(INT32).cast(FLOAT32), np.trunc),
        (lambda x: x.op("GREATER", 0.0, dtype=BOOL).cast(FLOAT32), lambda x: np.float32(x > 0)),
    ],
)
def test_arithmetic_accepts_numbers_and_arrays_and_values(
    formula: Callable[[Value], Value], wanted: Callable[[Array], Array]
) -> None:
    assert_computes(formula, wanted)


@pytest.mark.parametrize("dtype", [INT32, INT64])
def test_a_number_beside_integers_is_an_integer(dtype: np.dtype[Any]) -> None:
    assert_computes(lambda x: x * 3 - 1, lambda x: x * 3 - 1, dtype=dtype)


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        (lambda x: x.mean([2]), lambda x: x.mean(axis=2, keepdims=True)),
        (lambda x: x - x.mean([1, 2]), lambda x: x - x.mean(axis=(1, 2), keepdims=True)),
        (lambda x: x.total([1]), lambda x: x.sum(axis=1, keepdims=True)),
        (lambda x: x.total([1, 2], keep=False), lambda x: x.sum(axis=(1, 2))),
        (lambda x: x.total([0]), lambda x: x.sum(axis=0, keepdims=True)),
        (lambda x: x.total([0, 2]), lambda x: x.sum(axis=(0, 2), keepdims=True)),
        (lambda x: x.total([]), lambda x: x),
        (lambda x: x.reduced("REDUCE_MAX", [2], keep=False), lambda x: x.max(axis=2)),
    ],
)
def test_reductions_run_over_any_axes_or_over_no_axis(
    formula: Callable[[Value], Value], wanted: Callable[[Array], Array]
) -> None:
    assert_computes(formula, wanted)


def test_a_sum_of_integers_stays_exact() -> None:
    large = 2**24 + 1  # the smallest integer that FP32 cannot represent
    assert_computes(lambda x: x.total([1, 2]) + large, lambda x: x.sum((1, 2), keepdims=True) + large, dtype=INT64)


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        (lambda x: x.transposed((0, 2, 1)), lambda x: x.transpose(0, 2, 1)),
        (lambda x: x.reshaped(BatchShape((1, 12), (-1, 12))), lambda x: x.reshape(-1, 12)),
        (lambda x: x.reshaped(BatchShape((4, 3), (-1, 3))), lambda x: x.reshape(-1, 3)),
        (lambda x: x.gathered(np.array([3, 0, 0]), 2), lambda x: x[:, :, [3, 0, 0]]),
        (lambda x: x.gathered(np.array([1]), 1), lambda x: x[:, [1]]),
        (lambda x: x.sliced((0, 1, 2), BatchShape((1, 2, 2), (-1, 2, 2))), lambda x: x[:, 1:3, 2:4]),
        (lambda x: x.padded([(0, 0), (1, 0), (0, 2)]), lambda x: np.pad(x, [(0, 0), (1, 0), (0, 2)])),
        (
            lambda x: x.padded([(0, 0), (2, 0), (0, 3)], "REFLECT"),
            lambda x: np.pad(x, [(0, 0), (2, 0), (0, 3)], "reflect"),
        ),
        (
            lambda x: x.padded([(0, 0), (3, 0), (0, 4)], "SYMMETRIC"),
            lambda x: np.pad(x, [(0, 0), (3, 0), (0, 4)], "symmetric"),
        ),
    ],
)
def test_movements_of_elements_give_the_results_of_numpy(
    formula: Callable[[Value], Value], wanted: Callable[[Array], Array]
) -> None:
    assert_computes(formula, wanted)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_axis_that_was_moved_for_a_computation_is_moved_back(axis: int) -> None:
    assert_computes(
        lambda x: x.along_last(axis, lambda last: last.op("SOFTMAX", beta=1.0)),
        lambda x: np.exp(x) / np.exp(x).sum(axis=axis, keepdims=True),
    )


@pytest.mark.parametrize("item", [(4,), (3, 4), (2, 3, 4)])
def test_weights_are_applied_along_the_last_axis_of_any_rank(item: tuple[int, ...]) -> None:
    weights, bias = random(5, 4), random(5)
    assert_computes(lambda x: x.times_weights(weights), lambda x: x @ weights.T, item)
    assert_computes(
        lambda x: x.times_weights(weights, bias, "RELU"), lambda x: np.maximum(x @ weights.T + bias, 0), item
    )


def test_each_result_of_an_operator_has_its_own_shape() -> None:
    def formula(x: Value) -> Value:
        half = BatchShape((1, 3, 2), (-1, 3, 2))
        first, second = x.indices(2).op_of_many("SPLIT", [(half, FLOAT32)] * 2, x, numSplits=2)
        return second - first

    assert_computes(formula, lambda x: x[:, :, 2:] - x[:, :, :2])


def test_no_operator_is_written_for_a_movement_without_effect() -> None:
    _, x = an_input(*ITEM)
    assert x.transposed((0, 1, 2)) is x
    assert x.reshaped(BatchShape((1, *ITEM), (-1, *ITEM))) is x
    assert x.copied(x.shape).tensor != x.tensor, "a copy is one"


def test_a_batch_in_two_axes_is_refused_with_a_workaround() -> None:
    _, x = an_input(*ITEM)
    with pytest.raises(Unsupported, match=r"\[-1, -1, 12\]; export the model with its batch fixed to 1"):
        x.reshaped(BatchShape((1, 1, 12), (-1, -1, 12)))


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (((1, 3, 4), (-1, 3, 4)), ((4,), (4,)), ((1, 3, 4), (-1, 3, 4))),
        (((1, 1, 4), (-1, 1, 4)), ((3, 1), (3, 1)), ((1, 3, 4), (-1, 3, 4))),
        (((1, 4), (-1, 4)), ((1, 1, 4), (-1, 1, 4)), ((1, 1, 4), (-1, -1, 4))),
        (((), ()), ((1, 4), (-1, 4)), ((1, 4), (-1, 4))),
        (((1, 4), (1, 4)), ((1, 1), (-1, 1)), ((1, 4), (-1, 4))),
        (((0, 1), (0, 1)), ((1, 5), (1, 5)), ((0, 5), (0, 5))),
    ],
)
def test_shapes_broadcast_with_the_axes_of_the_batch(one: Any, other: Any, both: Any) -> None:
    for pair in ((one, other), (other, one)):
        assert broadcast(*(BatchShape(*each) for each in pair)) == BatchShape(*both)


def test_tensors_are_named_after_the_node_that_is_written() -> None:
    names = {
        detail["name"] for detail in Interpreter(model_content=file_of(lambda x: (x - 1) * x)).get_tensor_details()
    }
    assert {"y_sub", "y_mul", "y_constant"} <= names
