"""The ranges of the layers' answers, and their loss in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.activation_ranges import activations
from edgert_deploy.packager.accuracy.metrics import SQNR_DB_MAX
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models


def doubled(x: Any, tmp_path: Path) -> Any:
    """Return the range of the only layer of y = x + x."""
    source = load_source(
        models.write(models.model("float[N,64] x) => (float[N,64] y", "y = Add(x, x)"), tmp_path / "m")
    )
    (found,) = activations(source, CalibrationSet({"x": x.astype(np.float32)}, None))
    return found


def test_extremes_and_quantiles_describe_the_answer(tmp_path: Path) -> None:
    x = np.linspace(-1, 3, 16 * 64).reshape(16, 64)
    found = doubled(x, tmp_path)
    assert (found.op, found.low, found.high) == ("Add", -2.0, 6.0)
    assert found.quantiles == pytest.approx((-2 + 0.008, 2, 6 - 0.008), abs=1e-2)


def test_the_noise_equals_that_of_a_uniform_quantizer_and_an_outlier_increases_the_noise(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (16, 64))
    even = doubled(x, tmp_path)
    # The signal is amplitude^2 / 3 and the noise step^2 / 12. With 255 steps, the ratio is 20 log10(255) decibels.
    assert even.sqnr_db == pytest.approx(48.1, abs=0.5)
    x[0, 0] = 32.0
    assert doubled(x, tmp_path).sqnr_db < even.sqnr_db - 15
    assert doubled(np.zeros((16, 64)), tmp_path).sqnr_db == SQNR_DB_MAX
