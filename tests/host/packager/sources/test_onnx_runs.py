"""A model whose answer to a sample depends on the other samples of its batch is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.tensors import TensorSpec
from edgert_deploy.packager.sources.onnx_runs import Run, check_samples_are_independent
from edgert_deploy.packager.sources.tensor_specs import OneSampleOnly

Array = NDArray[Any]
RANDOM = np.random.default_rng(0)
OUTPUT = TensorSpec("y", "FP32", (-1, 4))
FLOATS, TOKENS = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("x", "INT64", (-1, 4))


def table(tokens: Array) -> Array:
    return np.eye(4, dtype=np.float32)[tokens[:, 0]]


def refuses(x: Array) -> Array:
    raise RuntimeError("index 1 is too large")


@pytest.mark.parametrize(
    ("spec", "compute"),
    [
        (FLOATS, lambda x: x / np.abs(x).max()),  # the level of the whole batch
        (FLOATS, lambda x: np.maximum(np.log10(np.abs(x)), np.log10(np.abs(x)).max() - 4)),  # 80 dB below the loudest
        (FLOATS, lambda x: (x - x.mean(0)) / (x.std(0) + 1)),  # a BatchNormalization in training mode
        (TOKENS, lambda x: np.repeat(x.sum(keepdims=True), 2, 0)),
    ],
)
def test_an_answer_that_changes_with_another_sample_is_found(spec: TensorSpec, compute: Any) -> None:
    with pytest.raises(OneSampleOnly, match="'y' of a sample depends on the other samples of its batch; "):
        check_samples_are_independent(lambda feed: [compute(feed["x"])], [spec], [OUTPUT])


@pytest.mark.parametrize(
    ("spec", "compute"),
    [
        (FLOATS, lambda x: x / np.abs(x).max(axis=1, keepdims=True)),
        (FLOATS, lambda x: np.sqrt(x) + np.exp(x)),  # NaN and infinity
        (FLOATS, lambda x: np.full((len(x), 4), np.nan)),
        (FLOATS, lambda x: x + RANDOM.normal(0, 1, x.shape)),
        (FLOATS, lambda x: x[x[:, 0] > 10]),  # boxes that the model itself suppresses
        (TOKENS, table),
        (TOKENS, refuses),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_samples_that_are_computed_alone_and_a_refused_batch_prove_nothing(spec: TensorSpec, compute: Any) -> None:
    run: Run = lambda feed: [compute(feed["x"])]  # noqa: E731
    check_samples_are_independent(run, [spec], [OUTPUT])
