"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgert.reporting import stop_reporting
from edgert.signing import SigningKey, new_key

DIGITS = Path(__file__).parents[1] / "examples" / "digits"

stop_reporting()  # before a test imports a vendor's SDK by itself


@pytest.fixture(scope="session")
def signing_key() -> SigningKey:
    return new_key()


@pytest.fixture(scope="session")
def digits_source() -> Any:
    from edgert_deploy.source import load_source

    return load_source(DIGITS / "digits.onnx")


@pytest.fixture(scope="session")
def digits_calibration(digits_source: Any) -> Any:
    from edgert_deploy.calibration import load_samples

    return load_samples(DIGITS / "calibration.npz", digits_source, at_least=10)


@pytest.fixture(scope="session")
def digits_holdout(digits_source: Any) -> Any:
    from edgert_deploy.calibration import load_samples

    return load_samples(DIGITS / "holdout.npz", digits_source, at_least=10)
