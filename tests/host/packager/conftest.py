"""Fixtures of the packager's tests: a request to build the digits, and fast probes of models."""

from __future__ import annotations

from typing import Any

import pytest

from edgert.bundle.rules import Classify, Preprocess
from edgert_deploy.packager.candidates import measure
from tests.support.profiles import profile


@pytest.fixture(autouse=True)
def models_are_examined(request: pytest.FixtureRequest) -> None:
    """Examine models in forks. Only test_probe.py has real probes."""
    if request.path.name != "test_probe.py":
        request.getfixturevalue("probes_are_forks")


@pytest.fixture(autouse=True)
def timings_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time candidates for 0.3 s instead of 5 s."""
    monkeypatch.setattr(measure, "SECONDS", 0.3)


@pytest.fixture
def build_request(digits_source: Any, digits_calibration: Any, digits_holdout: Any) -> Any:
    from edgert_deploy.packager.request import BuildRequest

    return BuildRequest(
        source=digits_source,
        calibration=digits_calibration,
        holdout=digits_holdout,
        targets=(profile("one"), profile("two"), profile("jetson", "tensorrt", "aarch64")),
        model="digits",
        preprocess=Preprocess("image", 0.0625),
        classify=Classify("scores", tuple("0123456789")),
    )
