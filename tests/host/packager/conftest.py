"""A request to build the digits, for the tests of the packager, and probes that take no second each."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from edgert.bundle.rules import Classify, Preprocess
from edgert_deploy.packager import measure
from edgert_deploy.packager.sources import probe
from tests.support.forked import Forked
from tests.support.profiles import profile

LOADED = ("onnx", "onnxruntime", "ai_edge_litert.interpreter")


@pytest.fixture(scope="session")
def forked_probe() -> Iterator[Forked]:
    with Forked(*(module for module in LOADED if find_spec(module.partition(".")[0]))) as forked:
        yield forked


@pytest.fixture(autouse=True)
def probes_are_forks(request: pytest.FixtureRequest, forked_probe: Forked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine models in forks, under a real probe's limits; test_probe.py has real probes."""
    if request.path.name != "test_probe.py":
        monkeypatch.setattr(probe, "ask", forked_probe.ask)


@pytest.fixture(autouse=True)
def timings_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time candidates for a second in place of five."""
    monkeypatch.setattr(measure, "SECONDS", 1.0)


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
