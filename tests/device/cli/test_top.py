"""`edgertd top`: rates are of the interval, counters of a new worker begin at 0, and every part of a model is shown."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from edgert.cli.top import lines_of, view_of
from tests.support.devices import a_device, wait_until

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
PERCENTILES = {"p50": 1.5, "p95": 2.5, "p99": 3.5, "p999": 4.5, "max": 5.5}
WINDOW = {
    "window_s": 10.0,
    "answered": 100,
    "batch_mean": 3.5,
    "latency_ms": PERCENTILES,
    "stages_ms": {"queue": PERCENTILES, "preprocess": dict.fromkeys(PERCENTILES, 0.0)},
}


def status(requests: int, closed: dict[str, int], pid: int = 7, **changes: Any) -> dict[str, Any]:
    model = {
        "state": "ready",
        "fault": None,
        "pid": pid,
        "memory_mb": 41.0,
        "release": 3,
        "engine": "tflite",
        "batch_cap": 8,
        "threads": 2,
        "connections": 4,
        "waiting": 1,
        "batches_closed": closed,
        "batcher": {"instances": 1, "tuner": None},
        "requests": {
            "requests": requests,
            "errors": 1,
            "shed": 2,
            "cache_hits": 0,
            "window": copy.deepcopy(WINDOW),
            "last_window": None,
        },
        "cache": {"why": "on: hits saved 3.0 times what lookups took", "entries": 5, "bytes": 1e6, "max_bytes": 16e6},
        "near": None,
        "shadow": None,
        **changes,
    }
    return {"pid": 1, "models": {"echo": model}}


def test_rates_are_of_the_interval() -> None:
    view = view_of(status(100, {"idle": 10}), status(300, {"idle": 30, "cap": 20}), 2.0)
    model = view["models"][0]
    assert (model["requests_per_s"], model["batches_per_s"]) == (100.0, 20.0)
    assert model["closed_per_s"] == {"idle": 10.0, "cap": 10.0}
    assert model["latency_ms"]["p99"] == 3.5


def test_a_new_worker_counts_from_nothing() -> None:
    view = view_of(status(1000, {"idle": 900}), status(40, {"idle": 20}, pid=8), 2.0)
    assert view["models"][0]["requests_per_s"] == 20.0
    assert view["models"][0]["batches_per_s"] == 10.0


def test_a_window_that_has_just_begun_gives_way_to_the_last_whole_one() -> None:
    after = status(300, {})
    requests = after["models"]["echo"]["requests"]
    requests["last_window"] = {**WINDOW, "batch_mean": 9.0}
    requests["window"]["answered"] = 0
    assert view_of(status(0, {}), after, 1.0)["models"][0]["batch_mean"] == 9.0


def test_a_model_that_is_not_loaded_is_shown_with_its_fault() -> None:
    down = {"pid": 1, "models": {"echo": {"state": "quarantined", "fault": "segmentation fault", "pid": None}}}
    lines = lines_of(view_of(status(5, {}), down, 1.0), width=100)
    assert any("quarantined" in line for line in lines)
    assert any("segmentation fault" in line for line in lines)


def test_lines_hold_every_part_and_keep_to_the_width() -> None:
    near = {
        "on": True, "why": "one near hit in 50 is computed and compared", "hit_rate": 0.75, "distance": 0.02,
        "distance_mean": 0.004, "distance_max": 0.011, "agreement": None, "sampled": 0,
    }  # fmt: skip
    shadow = {
        "on": True, "alarm": 1, "agreement": 0.8, "cosine_mean": 0.97, "drift": 0.1, "total": 200,
        "dropped_total": 3, "fault": None,
    }  # fmt: skip
    tuner = {"target_p95_ms": 20.0, "p95_ms": 18.5, "state": "holds", "cap": 6, "linger_share": 0.05}
    after = status(300, {"idle": 5}, near=near, shadow=shadow, batcher={"instances": 2, "tuner": tuner})
    view = view_of(status(100, {}), after, 1.0)
    text = "\n".join(lines_of(view, width=400))
    for word in (
        "echo",
        "200.0",
        "idle 5/s",
        "queue 1.5/3.5",
        "hits saved 3.0",
        "75.0%",
        "ALARM",
        "p95 20 ms",
        "2 x 2",
    ):
        assert word in text, word
    assert "preprocess" not in text, "stages that took no time are left out"
    assert all(len(line) <= 60 for line in lines_of(view, width=60))


def test_in_a_narrow_terminal_whole_columns_are_left_out() -> None:
    heading, row = lines_of(view_of(status(100, {}), status(300, {}), 1.0), width=80)[1:3]
    assert heading.split() == ["MODEL", "STATE", "REQ/S", "P50", "MS", "P99", "MS", "CLIENTS", "WAIT", "ERRORS"]
    assert row.split() == ["echo", "ready", "200.0", "1.5", "3.5", "4", "1", "1"]


def test_the_real_daemon_is_watched() -> None:
    with a_device("[models.echo]\np95_ms = 50\n") as device:
        device.deploy()
        with device.client() as client:
            for value in range(50):
                client.infer("echo", ITEM * value, cache=False)
            wait_until(lambda: device.model()["serving"]["requests"]["requests"] >= 50, "the requests are counted")
            view = device.run("top", "--once", "--interval", "0.2")
            watching = subprocess.Popen(
                [sys.executable, "-m", "edgert.cli", "--state", str(device.state.root), "top", "--interval", "0.1"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert watching.stdout is not None
            assert "1 model," in watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert (watching.communicate(timeout=30)[1], watching.returncode) == ("", 0)
        model = view["models"][0]
        assert (model["model"], model["state"], model["engine"]) == ("echo", "ready", "null")
        assert model["latency_ms"]["p50"] > 0
        assert model["tuner"]["target_p95_ms"] == 50
        assert model["stages_ms"]["engine"]["p99"] > 0
