"""A request to build the digits, for the tests of the packager."""

from __future__ import annotations

from typing import Any

import pytest

from edgert.bundle.rules import Classify, Preprocess
from tests.support.profiles import profile


@pytest.fixture
def request_(digits_source: Any, digits_calibration: Any, digits_holdout: Any) -> Any:
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
