"""Golden samples through the daemon's socket, sent to a daemon that answers and to a daemon that refuses."""

from __future__ import annotations

import numpy as np

from edgert.checks.golden_client import GoldenClient
from edgert.checks.health import check_served
from edgert.config import read_config
from edgert.versions.installed import load_live
from edgert.versions.slot_store import SlotStore
from tests.support.devices import a_device


def test_golden_samples_are_answered_like_requests_of_apps_and_a_refused_sample_is_counted() -> None:
    with a_device() as device:
        device.put()
        store, config = SlotStore(device.state.models / "echo"), read_config(device.state)
        version = load_live(store, config)
        with GoldenClient(version, device.state, config) as client:
            assert client.served()["release"] == version.manifest.release
            for sample in client.samples:
                assert np.array_equal(client.infer(sample)[0], sample[0])
            assert client.infer_many(5, for_s=60.0) == 5
            assert client.infer_many(5, for_s=0.0) == 0
        assert check_served("echo", store, device.state, config)["samples"] == len(client.samples)
        with GoldenClient(version, device.state, config) as client:
            device.stop()
            assert client.infer_many(3, for_s=60.0) == 3
