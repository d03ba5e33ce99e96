"""`edgertd top`: rates of the interval, counters of a new worker from 0, and every part of a model."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from edgert.checks.status import (
    BatcherStatus,
    DaemonStatus,
    MemoryStatus,
    NearCacheStatus,
    ServingStatus,
    ShadowStatus,
    TunerStatus,
)
from edgert.cli.top import lines_of, view_of
from tests.support.devices import WAIT_S_MAX, a_device, wait_until
from tests.support.statuses import LOADED, WINDOW, worker_figures

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)


def status(requests: int, closed: dict[str, int], pid: int = 7, **changes: Any) -> DaemonStatus:
    figures = worker_figures(requests, closed, **changes)
    echo = ServingStatus("ready", pid=pid, memory_mb=41.0, loaded=LOADED, figures=figures)
    return DaemonStatus(1, "boot", MemoryStatus(41.0, 0.0), {"echo": echo})


def test_rates_are_computed_over_the_interval() -> None:
    view = view_of(status(100, {"idle": 10}), status(300, {"idle": 30, "cap": 20}), 2.0)
    (model,) = view.models
    assert (model.requests_per_s, model.batches_per_s) == (100.0, 20.0)
    assert model.closed_per_s == {"idle": 10.0, "cap": 10.0}


def test_the_rates_of_a_new_worker_count_from_zero() -> None:
    view = view_of(status(1000, {"idle": 900}), status(40, {"idle": 20}, pid=8), 2.0)
    assert view.models[0].requests_per_s == 20.0
    assert view.models[0].batches_per_s == 10.0


def test_the_last_whole_window_is_shown_instead_of_a_window_that_has_just_begun() -> None:
    begun, last = replace(WINDOW, answered=0), replace(WINDOW, batch_mean=9.0)
    requests = worker_figures(300, {}).requests
    assert requests.recent == WINDOW
    assert replace(requests, window=begun, last_window=last).recent == last


def test_a_model_that_is_not_loaded_is_shown_with_its_fault() -> None:
    echo = ServingStatus("quarantined", fault="segmentation fault")
    down = DaemonStatus(1, "boot", MemoryStatus(0.0, 0.0), {"echo": echo})
    lines = lines_of(view_of(status(5, {}), down, 1.0), width=100)
    assert any("quarantined" in line for line in lines)
    assert any("segmentation fault" in line for line in lines)


def test_the_lines_show_every_part_and_keep_to_the_width() -> None:
    near = NearCacheStatus(
        True, "one near hit in 50 is computed and compared", 0.02, 8, 6, 0.75, 0.004, 0.011, 0, 0, None
    )
    shadow = ShadowStatus(True, None, 1.0, 0, 200, 160, 3, 0.8, 0.97, 0.9, 0.1, True)
    batcher = BatcherStatus(1, 0, 2, TunerStatus(20.0, 18.5, "holds", 6, 0.05))
    after = status(300, {"idle": 5}, near=near, shadow=shadow, batcher=batcher)
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
        "2 runs x 2",
    ):
        assert word in text, word
    assert "preprocess" not in text, "stages that took no time are left out"
    assert all(len(line) <= 60 for line in lines_of(view, width=60))


def test_in_a_narrow_terminal_whole_columns_are_left_out() -> None:
    heading, row = lines_of(view_of(status(100, {}), status(300, {}), 1.0), width=80)[1:3]
    assert heading.split() == ["MODEL", "STATE", "REQ/S", "P50", "MS", "P99", "MS", "CLIENTS", "WAIT", "ERRORS"]
    assert row.split() == ["echo", "ready", "200.0", "1.5", "3.5", "4", "1", "1"]


def test_the_command_watches_a_real_daemon() -> None:
    with a_device("[models.echo]\np95_ms = 50\n") as device:
        device.put()
        with device.client() as client:
            for value in range(50):
                client.infer("echo", ITEM * value, cache=False)
            wait_until(lambda: device.serving()["requests"]["requests"] >= 50, "the requests are counted")
            view = device.run("top", "--once", "--interval", "0.2s")
            watching = subprocess.Popen(
                [sys.executable, "-m", "edgert.cli", "--state", str(device.state.root), "top", "--interval", "0.1s"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert watching.stdout is not None
            assert "1 model," in watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert (watching.communicate(timeout=WAIT_S_MAX)[1], watching.returncode) == ("", 0)
        model = view["models"][0]
        assert (model["model"], model["state"], model["engine"]) == ("echo", "ready", "null")
        window = model["requests"]["window"]
        assert window["latency_ms"]["p50"] > 0
        assert model["batcher"]["tuner"]["target_p95_ms"] == 50
        assert window["stages_ms"]["engine"]["p99"] > 0
