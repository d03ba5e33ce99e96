"""A benchmark through the socket measures each answer, and ends at a failure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgert.checks.bench_live import bench_live, serving_of
from edgert.config import read_config
from edgert.errors import BundleCorrupt, DaemonUnreachable
from edgert.versions.slot_store import SlotStore
from tests.support.devices import a_device
from tests.support.stand_ins.loaded_models import installed


def test_the_live_version_is_measured_alone_and_by_several_clients() -> None:
    told: list[str] = []
    with a_device() as device:
        device.put()
        store = SlotStore(device.state.models / "echo")
        found = bench_live("echo", store, device.state, read_config(device.state), 0.02, 3, told.append)
        assert serving_of("nothing", device.state).state == "not served"
    (result,) = found.results
    assert (result.id, result.engine, result.clients) == ("live: null of release 1", "null", 3)
    assert result.times is not None
    assert 0 < result.times.p50_ms <= result.times.p99_ms
    assert told == ["echo: one client for 0.01 s", "echo: 3 clients for 0.01 s"]


@pytest.mark.parametrize(
    ("rows", "error"), [(2, DaemonUnreachable), (0, BundleCorrupt)], ids=["no-daemon", "no-samples"]
)
def test_a_client_that_fails_ends_the_measurement_with_its_reason(
    tmp_path: Path, rows: int, error: type[Exception]
) -> None:
    version, state, config = installed(tmp_path)
    np.save(version.folder / "golden/input-0.npy", np.zeros((rows, 4), np.float32))
    with pytest.raises(error):
        bench_live("echo", SlotStore(state.models / "echo"), state, config, 0.01, 2, lambda line: None)
